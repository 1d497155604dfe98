"""What travels with a request through proxies: flat keys that they know, and ours beside them.

The flat keys are those of vLLM's NixlConnector, so that its proxies work unchanged; they belong to
the first connector. All connectors stand under ``kvbridge``, by their names.

Two flags say what an engine shall do with a request: load it, since its cache is elsewhere
(``do_remote_prefill``), and keep its blocks when it has finished, since they will be wanted
elsewhere (``do_remote_decode``). Either, both or none may be set. A router sets the second one.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvbridge.connector.values import BlockIds
from kvbridge.errors import ConfigError
from kvbridge.handshake import EngineAddress
from kvbridge.handshake.address import shown
from kvbridge.session import Lease
from kvbridge.session.leases import EPOCH_BITS, SLOTS

PARAMS_VERSION = 1
KEY = "kvbridge"
_WHERE = "kv_transfer_params"

_NAME_MAX_LENGTH = 1024
_NAME = f"text of 1 to {_NAME_MAX_LENGTH} characters, none of them half of a surrogate pair"

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Block = Annotated[int, Meta(ge=0, lt=1 << 32)]
# JSON can carry half a surrogate pair, which is no text that can be sent on.
_Name = Annotated[
    str, Meta(min_length=1, max_length=_NAME_MAX_LENGTH, pattern="^[^\ud800-\udfff]*$")
]
_Slot = Annotated[int, Meta(ge=0, lt=SLOTS)]
_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_Epoch = Annotated[int, Meta(gt=0, lt=1 << EPOCH_BITS)]

_MISSING = re.compile(r"Object missing required field (\w+)")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_KINDS = {
    "str": _NAME,
    "int": "a whole number",
    "float": "a number",
    "array": "a list",
    "object": "a mapping",
}
_UNREADABLE = (msgspec.ValidationError, UnicodeError, RecursionError)

_UNCHANGED = "pass on what the other engine's connector returned, unchanged"
_TO_ROUTER = "correct it in the router, or whatever else chose the transfer_id"


class RemoteRequest(msgspec.Struct, frozen=True):
    """Where the blocks of a request are.

    Attributes:
        engine_id: The engine that holds them.
        request_id: Its name for the request.
        address: Where its handshake server listens; None to look it up in a registry.
        block_ids: The blocks, for each of its cache groups.
        num_tokens: Tokens that they hold, from the first one on.
        incarnation: Which start of the engine; None if that is unknown.
        generation: Which registration of its memory; 0 if that is unknown.
        lease: The engine's promise to keep the blocks; None if it gives none.
        lease_s: How long it keeps them, unless it is asked to keep them longer; 0 if unknown.
        is_expected: Whether it has none yet, and writes them once they are computed.
        tokens_digest: What tells those tokens from others; empty where that is not known.
    """

    engine_id: str
    request_id: str
    address: EngineAddress | None
    block_ids: BlockIds
    num_tokens: int
    incarnation: str | None = None
    generation: int = 0
    lease: Lease | None = None
    lease_s: float = 0.0
    is_expected: bool = False
    tokens_digest: str = ""


class _Entry(msgspec.Struct, frozen=True):
    """One connector's part of the params."""

    remote_engine_id: _Name
    remote_request_id: _Name
    remote_block_ids: tuple[tuple[_Block, ...], ...]
    remote_num_tokens: _Count
    remote_host: Any = None  # both are read as one address
    remote_port: Any = None
    remote_lease: tuple[_Slot, _Epoch] | None = None
    incarnation: _Name | None = None
    generation: _Count = 0
    lease_s: _Seconds = 0.0
    tokens_digest: tuple[_Count, _Name] | None = None  # of how many tokens

    @property
    def own_digest(self) -> str:
        """What tells all of the tokens from others; empty if a router has left some of them out."""
        count, digest = self.tokens_digest or (0, "")
        return digest if count == self.remote_num_tokens else ""


class _Expected(msgspec.Struct, frozen=True):
    """A request that another engine is still computing, under a name that both were given."""

    remote_engine_id: _Name
    remote_num_tokens: _Count = (1 << 63) - 1
    remote_host: Any = None  # both are read as one address
    remote_port: Any = None


class _Ours(msgspec.Struct, frozen=True):
    version: _Count
    children: dict[str, Any]  # each is read by its own connector, whatever the others hold


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether a request's cache is in another engine, to be loaded from there."""
    return isinstance(params, Mapping) and _is_true(params.get("do_remote_prefill"))


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine will want a request's cache, once it has finished here."""
    return isinstance(params, Mapping) and _is_true(params.get("do_remote_decode"))


def _is_true(value: object) -> bool:
    """Whether a flag is set; a word is none, lest ``"false"`` count as true."""
    return value is True or (isinstance(value, int | float) and value == 1)


def chosen_id(params: Mapping[str, Any] | None) -> str | None:
    """Return the name under which both engines were told to know a request; None if there is none.

    Raises:
        ConfigError: It is no name.
    """
    chosen = params.get("transfer_id") if isinstance(params, Mapping) else None
    if chosen is None:
        return None
    mend = f"{_TO_ROUTER}, and give both engines the same one, such as a uuid"
    return _read(chosen, _Name, f"{_WHERE}: transfer_id", mend)


def offer(request: RemoteRequest, name: str, **sizes: int) -> dict[str, Any]:
    """Return what a producer gives a request to take along.

    The next engine shall load it. Whether its blocks will be wanted after that, no engine knows;
    whoever does sets ``do_remote_decode`` on the way.

    Args:
        request: Where its blocks are.
        name: Name of the connector.
        **sizes: Sizes of the engine, such as ``tp_size``, for proxies and other engines.
    """
    flat = {
        "remote_engine_id": request.engine_id,
        "remote_request_id": request.request_id,
        "remote_host": request.address.host if request.address else None,
        "remote_port": request.address.port if request.address else None,
        "remote_block_ids": [list(ids) for ids in request.block_ids],
        "remote_num_tokens": request.num_tokens,
        "remote_lease": list(request.lease) if request.lease else None,
    }
    entry: dict[str, Any] = {
        **flat,
        "incarnation": request.incarnation,
        "generation": request.generation,
        "lease_s": request.lease_s,
        "tokens_digest": (
            [request.num_tokens, request.tokens_digest] if request.tokens_digest else None
        ),
    }
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **flat,
        **sizes,
        KEY: {"version": PARAMS_VERSION, "children": {name: entry}},
    }


def merge_offers(offers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the params of several connectors as one; the flat keys are the first one's."""
    first = next(iter(offers.values()))
    children: dict[str, Any] = {}
    for name, params in offers.items():
        ours = params.get(KEY)
        children[name] = next(iter(ours["children"].values())) if ours else dict(params)
    return {**first, KEY: {"version": PARAMS_VERSION, "children": children}}


def offered_by(params: Mapping[str, Any]) -> list[str]:
    """Return the names of the connectors that offer a request; none are named by flat keys."""
    ours = params.get(KEY)
    return sorted(ours["children"]) if isinstance(ours, Mapping) else []


def remote_request(params: Mapping[str, Any], name: str) -> RemoteRequest | None:
    """Return where a request's blocks are, for a connector; None if it has no part in them.

    Args:
        params: What came with the request, from whoever sent it.
        name: Name of the connector. Without our key, the flat keys are everybody's.

    Raises:
        ConfigError: A value is missing or of the wrong kind; its name is in the message.
    """
    if KEY in params:
        ours = _read(params[KEY], _Ours, f"{_WHERE}: {KEY}")
        if ours.version != PARAMS_VERSION:
            raise ConfigError(
                f"{_WHERE}: {KEY}.version is {ours.version}, this side reads {PARAMS_VERSION}; "
                "upgrade the older engine"
            )
        if name not in ours.children:
            return None
        entry = _read(ours.children[name], _Entry, f"{_WHERE}: {KEY}.children.{name}")
    else:
        flat = dict(params)
        ids = flat.get("remote_block_ids")
        chosen = chosen_id(flat) if ids is None else None
        if chosen is not None:
            return _expected(chosen, _read(flat, _Expected, _WHERE, _TO_ROUTER))
        if isinstance(ids, list | tuple) and all(isinstance(each, int | float) for each in ids):
            flat["remote_block_ids"] = [ids]  # of engines with one cache group
        entry = _read(flat, _Entry, _WHERE)
    return RemoteRequest(
        entry.remote_engine_id,
        entry.remote_request_id,
        _address(entry, _UNCHANGED),
        entry.remote_block_ids,
        entry.remote_num_tokens,
        entry.incarnation,
        entry.generation,
        Lease(*entry.remote_lease) if entry.remote_lease else None,
        entry.lease_s,
        tokens_digest=entry.own_digest,
    )


def _expected(chosen: str, entry: _Expected) -> RemoteRequest:
    return RemoteRequest(
        entry.remote_engine_id,
        chosen,
        _address(entry, _TO_ROUTER),
        (),
        entry.remote_num_tokens,
        is_expected=True,
    )


def _address(entry: _Entry | _Expected, mend: str) -> EngineAddress | None:
    host, port = entry.remote_host, entry.remote_port
    if host is None and port is None:
        return None
    if host is None:
        raise ConfigError(
            f"{_WHERE}: remote_port is {shown(port)}, but remote_host is null; {mend}, or leave "
            "out both to look the engine up in the registry"
        )
    try:
        address = EngineAddress.of(host, port, where=f"{_WHERE}: remote_host, remote_port")
    except ConfigError as error:
        raise ConfigError(f"{error}; {mend}") from error
    if not address.port:
        raise ConfigError(f"{_WHERE}: remote_port is 0, where nobody can answer; {mend}")
    return address


_T = TypeVar("_T")


def _read(value: object, kind: type[_T], where: str, mend: str = _UNCHANGED) -> _T:
    """Convert plain data; numbers may have become floats, or text, on the way (report B64)."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except _UNREADABLE as error:
        raise ConfigError(f"{where}{_fault(str(error), value)}; {mend}") from error


def _fault(error: str, value: object) -> str:
    """Say which part of some data is not as msgspec expects it, and what it is instead."""
    said, _, path = error.replace("`", "").partition(" - at ")
    field = path.removeprefix("$").removeprefix(".")
    if missing := _MISSING.fullmatch(said):
        return f": {field}{'.' if field else ''}{missing[1]} is missing"
    for key, index in _STEP.findall(path):
        if key and isinstance(value, Mapping):
            value = value[key]
        elif index and isinstance(value, list | tuple):
            value = value[int(index)]
    found = f"{': ' if field else ''}{field} is {shown(value)}"
    if not said.startswith("Expected "):
        return f"{found}: {said}"
    kind, _, bounds = said.removeprefix("Expected ").partition(", got ")[0].partition(" ")
    bounds = "or null" if bounds == "| null" else bounds
    if kind == "str" and bounds != "or null":
        bounds = ""  # a name's are said together
    return f"{found}, expected {_KINDS.get(kind, kind)} {bounds}".rstrip()
