"""Engines for one test: they spin while they have anything to do, so few are up at a time."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbridge.namespaces import private_network
from tests.vllm.engines import Engine, transfer_config
from tests.vllm.models import make_model

Start = Callable[..., Engine]
Pair = Callable[..., tuple[Engine, Engine]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return where a model is, by its name."""
    directory = tmp_path_factory.mktemp("models")
    return lambda name: make_model(name, directory)


@pytest.fixture(autouse=True)
def own_network() -> Iterator[None]:
    """Run where nobody else is: some transports listen on every interface."""
    with private_network():
        yield


@pytest.fixture
def start(
    own_network: None, model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Start an engine, which ends with the test."""
    logs = tmp_path_factory.mktemp("logs")
    engines: list[Engine] = []

    def start(of: str = "llama", **options: Any) -> Engine:
        log = logs / f"{len(engines)}.log"
        engines.append(Engine(model(of), log=log, **{"max_model_len": 4096, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def free_port(own_network: None) -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


@pytest.fixture
def pair(start: Start) -> Pair:
    """Start one engine that computes prompts and one that answers; both at the same time."""

    def pair(
        extra: dict[str, Any],
        of: str = "llama",
        *,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        connector: str = "KVBridgeConnector",
        **shared: Any,
    ) -> tuple[Engine, Engine]:
        policy = shared.pop("kv_load_failure_policy", "fail")
        engines = [
            start(
                of,
                transfer=transfer_config(
                    role, extra, connector=connector, kv_load_failure_policy=policy
                ),
                **shared,
                **(own or {}),
            )
            for role, own in (("kv_producer", prefill), ("kv_consumer", decode))
        ]
        first, second = (engine.ready() for engine in engines)
        return first, second

    return pair
