"""What all tests share: how much Hypothesis tries, and which transports must run."""

import os
import socket
from collections.abc import Callable
from importlib.metadata import entry_points

import pytest
from hypothesis import settings

from kvbridge.errors import TransportUnavailableError
from kvbridge.namespaces import NetworkNamespace
from kvbridge.testing.harness import required_transports as required_by_environment
from kvbridge.transport import Transport, available_transports, get_transport

# Examples are never timed: a busy machine would make them fail. Nor does CI draw new ones: whether
# a change goes in must not depend on luck.
settings.register_profile(
    "quick", deadline=None, max_examples=50, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile("full", deadline=None, max_examples=1000)
settings.load_profile("quick")

REQUIRED_TRANSPORTS = required_by_environment()


@pytest.fixture(scope="session")
def required_transports() -> frozenset[str]:
    """The transports that this machine promises to run."""
    return REQUIRED_TRANSPORTS


@pytest.fixture(scope="session")
def usable_transport() -> Callable[[str], type[Transport]]:
    """Look a transport up by name; skip the test where it cannot run, fail where it must."""
    found = available_transports()

    def look_up(name: str) -> type[Transport]:
        if name in found and found[name].ok:
            return get_transport(name)
        reason = f"transport {name!r}: " + (
            f"{found[name].reason} ({found[name].hint})" if name in found else "not installed"
        )
        if name in REQUIRED_TRANSPORTS:
            pytest.fail(f"{reason}, although KVBRIDGE_REQUIRE_TRANSPORTS lists it")
        pytest.skip(reason)

    return look_up


@pytest.fixture
def shared_network() -> None:
    """Skip the test where nothing but a loopback device is, for that makes open ports private."""
    if [name for _, name in socket.if_nameindex()] == ["lo"]:
        pytest.skip("this machine has no network but loopback")


@pytest.fixture
def network_namespaces(required_transports: frozenset[str]) -> None:
    """Skip the test where no network namespaces can be made, fail where they must."""
    try:
        NetworkNamespace().close()
    except TransportUnavailableError as error:
        if "mooncake" in required_transports:
            pytest.fail(str(error))
        pytest.skip(str(error))


NEED_OPTIONS = frozenset({"faulty", "mooncake", "recording"})
"""They do not open without options, and have tests of their own."""


@pytest.fixture(params=sorted(entry_points(group="kvbridge.transports").names - NEED_OPTIONS))
def transport_name(
    request: pytest.FixtureRequest, usable_transport: Callable[[str], type[Transport]]
) -> str:
    """Every installed transport in turn, where it can run."""
    name: str = request.param
    usable_transport(name)
    return name
