"""The contract between an engine and a connector."""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from kvbridge.connector.stats import Stats
from kvbridge.connector.values import BlockIds, Request, WorkerReport
from kvbridge.handshake import HandshakeMetadata, PPAwareHandshake
from kvbridge.model import RankCache
from kvbridge.session import Event


class Connector(PPAwareHandshake):
    """Moves caches for an engine.

    An engine has one *scheduler half* where it decides, and one *worker half* for each rank. Both
    are connectors of one class, and an engine calls on each what is the half's own. The hooks have
    the names that vLLM made standard, on values that belong to no engine.

    Order of calls, once:

    1. worker: :meth:`register_kv_caches`, then :meth:`get_handshake_metadata`
    2. scheduler: one of the two setters, with what all workers returned; see
       :func:`~kvbridge.handshake.hand_over`

    in each step:

    1. scheduler, for a new request: :meth:`get_num_new_matched_tokens`; once blocks are allocated
       :meth:`update_state_after_alloc`; when it has finished :meth:`request_finished`
    2. scheduler: :meth:`build_connector_meta`
    3. every worker: :meth:`start_load_kv` with it, and :meth:`get_finished`
    4. scheduler: :meth:`update_connector_output` with what the workers reported

    and at the end :meth:`shutdown` on all; before it, where others still need what the engine keeps
    for them, :meth:`drain` on the scheduler half and steps until :attr:`drained`. :attr:`ready` and
    :meth:`refusals` of the scheduler half may be asked at any time. No hook but :meth:`shutdown`
    waits for a peer. Each half is called from one thread.

    Steps go on while a request is loaded or its blocks are held, though there is nothing to
    compute: progress is made, and deadlines are looked at, in these calls alone.

    Attributes:
        required_layout: Order of axes that the caches must have, such as ``"BHNC"``; None for any.
    """

    required_layout: str | None = None

    # --- scheduler half --------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether requests may come, for an engine's readiness probe.

        False until every peer that is known beforehand has answered, or has been silent for as long
        as an answer may take; and while one of them is known not to fit. A peer that is silent does
        not count: it may be waiting for this engine to be ready. Always true without such peers.
        """
        return not self.refusals()

    def refusals(self) -> Mapping[str, str]:
        """Return why engines that are known beforehand do not fit, by their addresses."""
        return {}

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens beyond those computed can be loaded.

        Args:
            request: A request that waits.
            num_computed_tokens: Tokens whose cache is here already.

        Returns:
            Their number, None for "ask again later", and whether the load goes on beside the
            engine's steps.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Take the blocks that were allocated for a request.

        Args:
            request: The request.
            block_ids: All its blocks, from its first token on; :data:`~kvbridge.connector.NO_BLOCK`
                where a group has none for some tokens, such as those before its window.
            num_external_tokens: How many tokens are to be loaded into them; 0 if none is.
        """

    @abstractmethod
    def build_connector_meta(self) -> object:
        """Return what the workers must know of this step, and forget it; picklable."""

    @abstractmethod
    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """Take note that a request has finished; once for each, whatever became of it.

        Args:
            request: The request, with the tokens that it has computed.
            block_ids: Its blocks, as in :meth:`update_state_after_alloc`; none if it never had any.

        Returns:
            Whether its blocks must stay until a worker reports the request, and the params that it
            takes along to another engine. One that is given up while it is being loaded is reported
            as loaded once nothing writes to its blocks any more, all others as sent.
        """

    def request_progressed(self, request: Request, block_ids: BlockIds) -> None:
        """Take note of what a request has computed so far, while it goes on.

        An engine need not say it. Where another engine waits for the request already, what is there
        goes at once, instead of all of it at the end.

        Args:
            request: The request, with the tokens that it has computed in steps before this one.
            block_ids: Its blocks, from its first token on.
        """

    def request_preempted(self, request: Request) -> None:
        """Take note that a request loses its blocks, and will be computed again later."""

    def update_connector_output(self, report: WorkerReport) -> None:
        """Take note of what has ended on all workers."""

    def not_needed(self, request: Request) -> None:
        """Take note that a request that could be loaded here is loaded elsewhere, or not at all."""

    def standby_load(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> object | None:
        """Return a load that a worker may start later, in another connector's place.

        Args:
            request: The request.
            block_ids: All its blocks.
            num_external_tokens: How many tokens are to be loaded into them.

        Returns:
            What :meth:`start_standby` or :meth:`drop_standby` takes; picklable. None if this
            connector cannot stand by.
        """
        return None

    def drain(self, timeout_s: float) -> None:
        """Begin to end: offer nothing any more, and keep nothing for longer than this time.

        Readers that have begun go on; those that ask for more time get none beyond it. The engine
        goes on with its steps until :attr:`drained`.
        """

    @property
    def drained(self) -> bool:
        """Whether nothing is kept for other engines, and nothing is being loaded."""
        return True

    # --- worker half -----------------------------------------------------------------------------

    @abstractmethod
    def register_kv_caches(self, cache: RankCache) -> None:
        """Take the rank's cache; or another one in its place, before the old one is freed.

        Nothing may be loaded meanwhile. What was held is reported as sent and expired.
        """

    @abstractmethod
    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        """Return what this rank publishes; None if that is nothing, as without a cache."""

    @abstractmethod
    def start_load_kv(self, metadata: object) -> None:
        """Begin what the scheduler half asked for in this step."""

    @abstractmethod
    def get_finished(self) -> WorkerReport:
        """Make progress, and report what has ended since the last call."""

    @property
    def busy(self) -> bool:
        """Whether this rank has begun what only more calls of :meth:`get_finished` bring to an end.

        That may be more than requests wait for: to tell another engine that its blocks are not
        needed, say. An engine that does not step while it is idle asks this before it stops.
        """
        return False

    def wait(self, timeout_s: float) -> None:
        """Sleep until :meth:`get_finished` may have something to report, or the time is over.

        For an engine that has nothing to compute: one that only calls :meth:`get_finished` in a
        loop keeps the interpreter from the threads that move its bytes. Not all that may be
        reported ends the sleep early, so wait for a millisecond or two at a time.

        Args:
            timeout_s: The longest time.
        """
        time.sleep(timeout_s)

    def start_standby(self, load: object, *, timeout_s: float) -> None:
        """Start a load that was standing by; :meth:`get_finished` reports how it ended."""

    def drop_standby(self, load: object) -> None:
        """Give up a load that was standing by, and tell the other engine."""

    def abort_load(self, request_id: str) -> None:
        """Go on no further with a load, if one runs; :meth:`get_finished` reports its end."""

    def record_events(self, record: Callable[[], Event]) -> None:
        """Write what has been computed only once a device has come so far.

        For an engine whose device works beside its host. An event is recorded at the start of each
        step that says what requests have computed before it.

        Args:
            record: Records an event where the device is now, such as one of ``torch.cuda``.
        """

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer may be used; loads beside the steps need no waiting."""

    def save_kv_layer(self, layer_name: str) -> None:
        """Take note that a layer has been computed."""

    def wait_for_save(self) -> None:
        """Wait until what the step computed may be overwritten."""

    # --- both ------------------------------------------------------------------------------------

    @abstractmethod
    def unregister_kv_caches(self) -> None:
        """Take the cache back, before its memory is freed: the engine goes to sleep.

        Call it on every worker half, and then on the scheduler half, which from then on refuses
        other engines and offers nothing. What was held is reported as sent and expired. Steps go
        on; what is to be loaded meanwhile fails. To wake up, register a cache again and hand over
        what the workers publish. Idempotent.

        Raises:
            MemoryBusyError: Requests are still being loaded, or others still have something of the
                cache written or digested. Go on with steps, and call it again.
        """

    def stats(self) -> Stats:
        """Return what this half has counted since it was made; from any thread, at any time.

        Nothing is sent with the steps: an engine asks as often as it likes, and adds what its ranks
        have counted where it wants to have it. Nothing, for a connector that counts nothing.
        """
        return Stats()

    @abstractmethod
    def shutdown(self) -> None:
        """Give everything back, after some seconds at most for what still moves. Idempotent.

        What was being loaded is not reported any more: keep its blocks mapped.
        """
