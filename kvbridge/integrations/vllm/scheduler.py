"""The half of vLLM's connector where requests are scheduled."""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from kvbridge.connector import ReportGatherer, Request, Stats, WorkerReport, scheduler_connector
from kvbridge.connector.params import wants_remote_decode, wants_remote_prefill
from kvbridge.handshake import HandshakeMetadata
from kvbridge.integrations.vllm.caches import Tables
from kvbridge.integrations.vllm.identity import Identities
from kvbridge.integrations.vllm.settings import connector_values
from kvbridge.integrations.vllm.stats import BridgeStats
from kvbridge.model import Rank

_ENDED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_SHORTENED = "_kvbridge_shortened"
"""Set in the params of a request whose last tokens have been left to whoever loads it."""

_TAKEN_MAX = 4096
"""So many offers are remembered, with the requests that they were for."""

_log = logging.getLogger(__name__)


class SchedulerHalf:
    """Decides for an engine; hooks as :class:`~kvbridge.connector.Connector` has them."""

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
        """Open the handshake port.

        Raises:
            ConfigError: Something in the configuration cannot be.
            HandshakeError: The port cannot be bound.
        """
        parallel = vllm_config.parallel_config
        self._connector = scheduler_connector(
            connector_values(vllm_config),
            engine_id=vllm_config.kv_transfer_config.engine_id,
            pp_size=parallel.pipeline_parallel_size,
        )
        self._ranks = list(
            itertools.product(
                range(parallel.pipeline_parallel_size), range(parallel.tensor_parallel_size)
            )
        )
        self._gatherer = ReportGatherer(self._ranks)
        self._tables = Tables(kv_cache_config)
        self._identities = Identities(vllm_config)
        self._left_out = max(
            int(self._tables.looks_back_less_than_all),
            getattr(vllm_config, "num_prefill_lookahead_tokens", 0) - 1,
        )
        self._awaited: dict[str, VllmRequest] = {}  # others may want them before they have finished
        self._counted: dict[Rank, Stats] = {}
        self._told = Stats()
        self._busy_ranks: set[Rank] = set()
        self._taken: OrderedDict[tuple[str, str], str] = OrderedDict()

    @property
    def busy(self) -> bool:
        """Whether a rank has begun what only more steps bring to its end."""
        return bool(self._busy_ranks)

    def publish(self, metadata: Mapping[Rank, HandshakeMetadata]) -> None:
        """Serve what the ranks have published."""
        self._connector.set_xfer_handshake_metadata_pp_aware(metadata)

    def arrived(self, request: VllmRequest) -> None:
        """Take note of a request, before it is scheduled."""
        params = request.kv_transfer_params
        if wants_remote_prefill(params) and not self._is_first(request):
            # One of several samples, or of several prompts in one HTTP request: blocks are of one.
            params = request.kv_transfer_params = {**params, "do_remote_prefill": False}
        if wants_remote_decode(params):
            shorten(request, self._left_out)
            if params.get("transfer_id") is not None:
                self._awaited[request.request_id] = request
        if wants_remote_prefill(params):
            # Asked once here, so that its blocks are kept however long it waits to be scheduled.
            self._connector.get_num_new_matched_tokens(self._seen(request), 0)

    def _is_first(self, request: VllmRequest) -> bool:
        """Whether nobody else has come with the same offer before."""
        params = request.kv_transfer_params
        name = params.get("remote_request_id") or params.get("transfer_id")  # or null
        offer = (params.get("remote_engine_id"), name)
        if not all(isinstance(each, str) for each in offer):
            return True
        first = self._taken.setdefault(offer, request.request_id)
        while len(self._taken) > _TAKEN_MAX:
            self._taken.popitem(last=False)
        if first != request.request_id:
            _log.warning(
                "request %s is computed here: what it is to load is %s's, and an offer is for one "
                "request; send prompts and samples one by one to have each of them loaded",
                request.request_id,
                first,
            )
        return bool(first == request.request_id)

    def matched_tokens(self, request: VllmRequest, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded."""
        return self._connector.get_num_new_matched_tokens(self._seen(request), computed)

    def allocated(self, request: VllmRequest, blocks: KVCacheBlocks, tokens: int) -> None:
        """Take the blocks that were allocated for a request."""
        if wants_remote_prefill(request.kv_transfer_params):
            block_ids = self._tables.of(blocks.get_block_ids())
            self._connector.update_state_after_alloc(self._seen(request), block_ids, tokens)

    def finished(
        self, request: VllmRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request that another engine will want."""
        self._awaited.pop(request.request_id, None)
        if not request.kv_transfer_params:
            return False, None
        has_blocks = any(block_ids)
        return self._connector.request_finished(
            self._seen(request, aborted=request.status not in _ENDED_WELL),
            self._tables.of(block_ids) if has_blocks else (),
        )

    def step(self, output: SchedulerOutput, manager: KVCacheManager | None) -> object:
        """Return what the workers must know of a step."""
        for request_id in output.preempted_req_ids or ():
            request = self._awaited.get(request_id)
            if request is not None:
                self._connector.request_preempted(self._seen(request))
        if self._awaited and manager is not None:
            self._progress(output, manager)
        return self._connector.build_connector_meta()

    def _progress(self, output: SchedulerOutput, manager: KVCacheManager) -> None:
        """Say what earlier steps have computed of requests that others may wait for."""
        for request_id in output.num_scheduled_tokens:
            request = self._awaited.get(request_id)
            if request is None:
                continue
            before = request.num_computed_tokens  # vLLM counts this step's once it is decided on
            if before > 0:
                block_ids = self._tables.of(manager.get_block_ids(request_id))
                self._connector.request_progressed(self._seen(request, computed=before), block_ids)

    def take(self, reports: Mapping[Rank, tuple[WorkerReport, bool, Stats | None]]) -> None:
        """Take note of what workers have reported."""
        for rank, (report, is_busy, counted) in reports.items():
            self._gatherer.add(rank, report)
            (self._busy_ranks.add if is_busy else self._busy_ranks.discard)(rank)
            if counted is not None:
                self._counted[rank] = counted
        self._connector.update_connector_output(self._gatherer.take())

    def counted(self) -> BridgeStats | None:
        """Return what the engine has counted since the last time; None if that is nothing."""
        now = sum(self._counted.values(), self._connector.stats())
        if now == self._told:
            return None
        before, self._told = self._told, now
        return BridgeStats.of(now.since(before), is_first=before == Stats())

    def close(self) -> None:
        """Free the port."""
        self._connector.shutdown()

    def _seen(
        self, request: VllmRequest, *, computed: int | None = None, aborted: bool = False
    ) -> Request:
        """Return a request as we know it.

        The last token of a prompt is never loaded, as it has to be computed for what comes out.
        """
        if computed is None:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
        return Request(
            request.request_id,
            max(0, request.num_prompt_tokens - 1),
            max(0, computed),
            request.kv_transfer_params,
            aborted,
            self._identities.of(request) if request.kv_transfer_params else None,
        )


def shorten(request: VllmRequest, tokens: int) -> None:
    """Leave the last prompt tokens to the engine that loads the request.

    It computes the last one in any case, since it needs what comes out of it. With a state, or
    a window, it can only do so from what the cache was *before* that token: a state cannot be
    taken back, and of a window vLLM frees what only that token would still have seen. With a
    draft model that looks ahead, its tokens are wrong until they are verified.

    Args:
        request: A request that another engine waits for.
        tokens: How many.
    """
    params = request.kv_transfer_params
    if (
        not tokens
        or params.get(_SHORTENED)
        or request.num_prompt_tokens <= tokens
        or request.get_skip_reading_prefix_cache()
    ):
        return
    if request.prompt_token_ids is None and request.prompt_embeds is None:
        return
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-tokens:]
    if request.prompt_embeds is not None:  # instead of tokens, or among them
        request.prompt_embeds = request.prompt_embeds[:-tokens]
    if request.prompt_is_token_ids is not None:
        del request.prompt_is_token_ids[-tokens:]
    del request._all_token_ids[-tokens:]  # noqa: SLF001 - as vLLM's own connector does
    request.num_prompt_tokens -= tokens
    request.max_tokens = 1
    params[_SHORTENED] = True
