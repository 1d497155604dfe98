"""What a transport can do, as one flat value."""

from dataclasses import dataclass
from typing import Literal

PeerLoss = Literal["event", "on_use", "none"]
Direction = Literal["read", "write", "either"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can do; everything is off until a driver declares it.

    What is not declared must be refused with :class:`~kvbridge.errors.NotSupportedError`.
    A transport announces the most that any peer may get; a peer announces what holds for it.

    Attributes:
        read: One-sided reads from a peer's registered memory. A read that the owner serves by
            writing on request counts as a read.
        write: One-sided writes into a peer's registered memory.
        notify: Free-standing notifications.
        notify_with_transfer: A notification tied to a transfer, which arrives only when the
            bytes of that transfer are visible to the peer.
        notify_max_bytes: Largest notification; 0 without ``notify``.
        memory_kinds: Kinds of memory that can be registered.
        descriptors_max: Most descriptors in one operation; 0 means no limit.
        inflight_max: Most operations in flight; 0 means no limit.
        transfer_max_bytes: Most bytes in one operation; 0 means no limit.
        failure_is_clean: A failed operation left its destination untouched.
        peer_loss: How a lost peer is found out: by an event, when it is next used, or not.
        owner_passive: The owner of the memory need not run any code for a transfer to proceed.
        owner_checks_bounds: The owner itself refuses addresses outside its regions.
        peers_in_process: Two agents may live in one process.
        needs_polling_to_send: Operations and notifications proceed only while ``poll`` is called.
        merge_helps_below: Merging adjacent copies pays for pieces smaller than this many bytes.
        preferred_direction: The operation that is faster or safer on this transport.
    """

    read: bool = False
    write: bool = False
    notify: bool = False
    notify_with_transfer: bool = False
    notify_max_bytes: int = 0
    memory_kinds: frozenset[str] = frozenset()
    descriptors_max: int = 0
    inflight_max: int = 0
    transfer_max_bytes: int = 0
    failure_is_clean: bool = False
    peer_loss: PeerLoss = "none"
    owner_passive: bool = False
    owner_checks_bounds: bool = False
    peers_in_process: bool = False
    needs_polling_to_send: bool = False
    merge_helps_below: int = 0
    preferred_direction: Direction = "either"
