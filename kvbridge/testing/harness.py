"""What a transport author hands to the suite."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal, NamedTuple, get_args

from kvbridge.config import check_timeout
from kvbridge.errors import ConfigError, TransportUnavailableError
from kvbridge.transport import Availability, Path, Transport, get_transport

SUITE_VERSION = 1
"""Rises with every release that adds rules."""

REQUIRED_VARIABLE = "KVBRIDGE_REQUIRE_TRANSPORTS"
"""Environment variable: transports that must run here, so that their tests never skip."""

WaiverKind = Literal["unsupported", "planned", "bug"]


@dataclass(frozen=True, slots=True)
class Waiver:
    """A rule that a transport is known to break. Strict: if the rule holds, that is an error.

    Attributes:
        rule: Id of the rule.
        kind: ``"unsupported"``: the library cannot do it; ``"planned"``: the driver does not do
            it yet; ``"bug"``: it should work.
        reason: Why, in a sentence.
        link: Where that is written down or followed up.
    """

    rule: str
    kind: WaiverKind
    reason: str
    link: str

    def __post_init__(self) -> None:
        """Refuse waivers that explain nothing.

        Raises:
            ConfigError: The kind is unknown, or the reason or the link is empty.
        """
        if self.kind not in ("unsupported", "planned", "bug"):
            raise ConfigError(
                f"waiver of {self.rule}: kind is {self.kind!r}; "
                "it must be 'unsupported', 'planned' or 'bug'"
            )
        if not (self.reason.strip() and self.link.strip()):
            raise ConfigError(f"waiver of {self.rule}: give a reason and a link")


class TransportSource(NamedTuple):
    """Where an agent's process finds the transport's class.

    Attributes:
        name: Name of an installed transport; empty where the class was given.
        module: Module of the class.
        qualname: Its name in there.
        file: The module's file, for modules that cannot be imported by name.
    """

    name: str = ""
    module: str = ""
    qualname: str = ""
    file: str = ""

    def load(self) -> type[Transport]:
        """Return the class.

        Raises:
            ConfigError: The module cannot be imported.
        """
        if self.name:
            return get_transport(self.name)
        try:
            found: Any = sys.modules.get(self.module) or importlib.import_module(self.module)
        except ImportError:
            found = self._load_file()
        for part in self.qualname.split("."):
            found = getattr(found, part)
        kind: type[Transport] = found
        return kind

    def _load_file(self) -> Any:
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise ConfigError(
                f"transport class {self.module}:{self.qualname} cannot be imported in another "
                "process; define it in a module that can be imported by its name"
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True, slots=True)
class TransportHarness:
    """A transport, and how the suite is to run it.

    Attributes:
        transport: The class, or the name of an installed transport.
        options: What its agents are opened with.
        waivers: Rules that it is known to break.
        suite_version: Rules that came later are reported as pending and fail nothing.
        isolate_network: Run all agents in one network namespace of their own, which nobody else
            can reach. For transports that listen without authentication.
        environment: Variables that are set in the agents' processes only.
        path: What must carry the bytes, where the options are meant to decide that.
        patience_s: How long an operation may take before it counts as hanging.
    """

    transport: type[Transport] | str
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict)
    waivers: Sequence[Waiver] = ()
    suite_version: int = SUITE_VERSION
    isolate_network: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None
    patience_s: float = 20.0

    def __post_init__(self) -> None:
        """Refuse what no suite has.

        Raises:
            ConfigError: The transport is neither a name nor a class, the path or the patience is
                none, the suite version is not one of 1 to :data:`SUITE_VERSION`, or two waivers
                name one rule.
        """
        __tracebackhide__ = True  # the line to look at is the test author's
        if not isinstance(self.transport, str) and not _is_transport(self.transport):
            raise ConfigError(
                f"transport is {self.transport!r}; give a subclass of "
                "kvbridge.transport.Transport, or the name of an installed transport"
            )
        if self.path not in (None, *get_args(Path)):
            raise ConfigError(
                f"path is {self.path!r}; it must be None or one of {', '.join(get_args(Path))}"
            )
        check_timeout(self.patience_s, "patience_s")
        if not 1 <= self.suite_version <= SUITE_VERSION:
            raise ConfigError(
                f"suite_version is {self.suite_version}; this KVBridge has 1 to {SUITE_VERSION}"
            )
        waived = [waiver.rule for waiver in self.waivers]
        if len(set(waived)) != len(waived):
            raise ConfigError(f"two waivers name one rule: {sorted(waived)}")

    @property
    def kind(self) -> type[Transport]:
        """The transport's class.

        Raises:
            UnknownTransportError: Nobody offers that name.
        """
        return get_transport(self.transport) if isinstance(self.transport, str) else self.transport

    @property
    def name(self) -> str:
        """The transport's name, which needs no driver to be there."""
        return self.transport if isinstance(self.transport, str) else self.transport.name

    @property
    def source(self) -> TransportSource:
        """How another process finds the class."""
        if isinstance(self.transport, str):
            return TransportSource(name=self.transport)
        kind = self.transport
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        module = FilePath(file).stem if kind.__module__ == "__main__" else kind.__module__
        return TransportSource("", module, kind.__qualname__, file)

    def waiver(self, rule_id: str) -> Waiver | None:
        """Return the waiver of a rule, if there is one."""
        return next((waiver for waiver in self.waivers if waiver.rule == rule_id), None)

    def availability(self) -> Availability:
        """Say whether the transport can run here.

        Raises:
            UnknownTransportError: Nobody offers that name.
        """
        try:
            return self.kind.probe()
        except TransportUnavailableError as error:
            return Availability(False, str(error), error.hint)


def _is_transport(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Transport)


def required_transports() -> frozenset[str]:
    """Return the transports that this machine promises to run, from the environment."""
    return frozenset(os.environ.get(REQUIRED_VARIABLE, "").replace(",", " ").split())
