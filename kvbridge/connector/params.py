"""What travels with a request through proxies: flat keys that they know, and ours beside them.

The flat keys are those of vLLM's NixlConnector, so that its proxies work unchanged; they belong to
the first connector. All connectors stand under ``kvbridge``, by their names.

Two flags say what an engine shall do with a request: load it, since its cache is elsewhere
(``do_remote_prefill``), and keep its blocks when it has finished, since they will be wanted
elsewhere (``do_remote_decode``). Either, both or none may be set. A router sets the second one.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvbridge.connector.values import BlockIds
from kvbridge.errors import ConfigError
from kvbridge.handshake import EngineAddress
from kvbridge.session import Lease
from kvbridge.session.leases import EPOCH_BITS, SLOTS

PARAMS_VERSION = 1
KEY = "kvbridge"

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# JSON can carry half a surrogate pair, which is no text that can be sent on.
_Name = Annotated[str, Meta(max_length=1024, pattern="^[^\ud800-\udfff]*$")]

_Chosen = Annotated[str, Meta(min_length=1, max_length=1024, pattern="^[^\ud800-\udfff]*$")]

_UNREADABLE = (msgspec.ValidationError, UnicodeError, RecursionError)


_Slot = Annotated[int, Meta(ge=0, lt=SLOTS)]
_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_Epoch = Annotated[int, Meta(gt=0, lt=1 << EPOCH_BITS)]


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


class _Entry(msgspec.Struct, frozen=True):
    """One connector's part of the params."""

    remote_engine_id: _Name
    remote_request_id: _Name
    remote_block_ids: tuple[tuple[_Count, ...], ...]
    remote_num_tokens: _Count
    remote_host: str | None = None
    remote_port: int | float | str | None = None
    remote_lease: tuple[_Slot, _Epoch] | None = None
    incarnation: _Name | None = None
    generation: _Count = 0
    lease_s: _Seconds = 0.0


class _Expected(msgspec.Struct, frozen=True):
    """A request that another engine is still computing, under a name that both were given."""

    remote_engine_id: _Name
    transfer_id: _Chosen
    remote_num_tokens: _Count = (1 << 63) - 1
    remote_host: str | None = None
    remote_port: int | float | str | None = None


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
    return None if chosen is None else _read(chosen, _Chosen, "kv_transfer_params: transfer_id")


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
    entry = {
        **flat,
        "incarnation": request.incarnation,
        "generation": request.generation,
        "lease_s": request.lease_s,
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
    where = "kv_transfer_params"
    if KEY in params:
        ours = _read(params[KEY], _Ours, f"{where}: {KEY}")
        if ours.version != PARAMS_VERSION:
            raise ConfigError(
                f"{where}: {KEY}.version is {ours.version}, this side reads {PARAMS_VERSION}; "
                "upgrade the older engine"
            )
        if name not in ours.children:
            return None
        entry = _read(ours.children[name], _Entry, f"{where}: {KEY}.children.{name}")
    else:
        flat = dict(params)
        if "transfer_id" in flat and flat.get("remote_block_ids") is None:
            return _expected(_read(flat, _Expected, where), where)
        ids = flat.get("remote_block_ids")
        if isinstance(ids, list | tuple) and all(isinstance(each, int | float) for each in ids):
            flat["remote_block_ids"] = [ids]  # of engines with one cache group
        entry = _read(flat, _Entry, where)
    return RemoteRequest(
        entry.remote_engine_id,
        entry.remote_request_id,
        _address(entry, where),
        entry.remote_block_ids,
        entry.remote_num_tokens,
        entry.incarnation,
        entry.generation,
        Lease(*entry.remote_lease) if entry.remote_lease else None,
        entry.lease_s,
    )


def _expected(entry: _Expected, where: str) -> RemoteRequest:
    return RemoteRequest(
        entry.remote_engine_id,
        entry.transfer_id,
        _address(entry, where),
        (),
        entry.remote_num_tokens,
        is_expected=True,
    )


def _address(entry: _Entry | _Expected, where: str) -> EngineAddress | None:
    if entry.remote_host is None:
        return None
    return EngineAddress.of(
        entry.remote_host, entry.remote_port, where=f"{where}: remote_host, remote_port"
    )


_T = TypeVar("_T")


def _read(value: object, kind: type[_T], where: str) -> _T:
    """Convert plain data; numbers may have become floats, or text, on the way (report B64)."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except _UNREADABLE as error:
        said = str(error).replace("`", "").replace("$.", "").replace("object", "a mapping")
        raise ConfigError(
            f"{where}: {said}; pass on what the other engine's connector returned, unchanged"
        ) from error
