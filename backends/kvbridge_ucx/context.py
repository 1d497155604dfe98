"""One context of UCX with one worker: all calls into libucp but its loading."""

import ctypes as c
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

from kvbridge_ucx import abi
from kvbridge_ucx.translate import BUSY, IN_PROGRESS, OK, UcxError
from kvbridge_ucx.ucp import API_VERSION, Ucp

# UCX is left alone for this many calls of progress, unless it has something to tell.
LOOKS_AT_ONCE = 8


class Mapped(NamedTuple):
    """Registered memory: UCX's handle, and what a peer needs to reach it."""

    handle: int
    rkey: bytes


class Context:
    """One UCX context with one worker. All calls but :meth:`map` come from one thread at a time.

    Attributes:
        address: What a peer connects to.
        event_fd: Becomes readable when there is something to progress, once armed.
    """

    def __init__(
        self,
        ucp: Ucp,
        settings: dict[str, str],
        received: Callable[[str, bytes], object],
        failed: Callable[[int, int], object],
    ) -> None:
        """Start it.

        Args:
            ucp: The library.
            settings: Names without the prefix ``UCX_``, and values.
            received: Called in :meth:`progress` with a sender and its message.
            failed: Called in :meth:`progress` with an endpoint that is lost, and the status.

        Raises:
            UcxError: A setting is unknown, or no network device can be used.
        """
        self._ucp, self._calls, self._short = ucp, ucp.calls, ucp.short
        self.text = ucp.text
        self._received, self._failed = received, failed
        # What C code may call must live as long as the context does.
        self._callbacks = (
            abi.Received(self._on_message),
            abi.Failed(self._on_failure),
            abi.Completed(self._on_end),
        )
        self._events: deque[Callable[[], object]] = deque()
        self._ends: dict[int, tuple[Callable[[int], object], object]] = {}
        self._next = 0
        self._context = self._make_context(settings)
        try:
            self._worker = self._make_worker()
        except UcxError:
            self._calls.ucp_cleanup(self._context)
            raise

    def _make_context(self, settings: dict[str, str]) -> int:
        config, context = abi.POINTER(), abi.POINTER()
        check = self._ucp.check
        check(self._calls.ucp_config_read(None, None, c.byref(config)), "ucp_config_read")
        try:
            for name, value in settings.items():
                check(
                    self._calls.ucp_config_modify(config, name.encode(), value.encode()),
                    f"ucp_config_modify({name}={value})",
                )
            parameters = abi.Params(mask=1, features=abi.FEATURES_RMA_AM_WAKEUP)
            status = self._calls.ucp_init_version(
                *API_VERSION, c.byref(parameters), config, c.byref(context)
            )
            check(status, "ucp_init")
        finally:
            self._calls.ucp_config_release(config)
        return context.value or 0

    def _make_worker(self) -> int:
        worker, fd = abi.POINTER(), c.c_int()
        check = self._ucp.check
        parameters = abi.WorkerParams(mask=1, thread_mode=abi.THREAD_MODE_SERIALIZED)
        check(
            self._calls.ucp_worker_create(self._context, c.byref(parameters), c.byref(worker)),
            "ucp_worker_create",
        )
        try:
            handler = abi.HandlerParams(
                mask=1 | 2 | 4,
                id=abi.AM_ID,
                flags=abi.AM_WHOLE_MESSAGE,
                callback=self._callbacks[0],
            )
            check(
                self._calls.ucp_worker_set_am_recv_handler(worker, c.byref(handler)),
                "ucp_worker_set_am_recv_handler",
            )
            check(self._calls.ucp_worker_get_efd(worker, c.byref(fd)), "ucp_worker_get_efd")
            attributes = abi.WorkerAttributes(mask=2)
            check(self._calls.ucp_worker_query(worker, c.byref(attributes)), "ucp_worker_query")
        except UcxError:
            self._calls.ucp_worker_destroy(worker)
            raise
        self.address = c.string_at(attributes.address, attributes.address_nbytes)
        self.event_fd = int(fd.value)
        self._calls.ucp_worker_release_address(worker, attributes.address)
        return worker.value or 0

    def close(self) -> None:
        """End it; nothing of it moves any byte afterwards. While something does, UCX aborts."""
        self._calls.ucp_worker_destroy(self._worker)
        self._calls.ucp_cleanup(self._context)

    # Memory.

    def map(self, address: int, nbytes: int) -> Mapped:
        """Register memory."""
        memory, buffer, size = abi.POINTER(), abi.POINTER(), c.c_size_t()
        parameters = abi.MapParams(mask=1 | 2, address=address, nbytes=nbytes)
        self._ucp.check(
            self._calls.ucp_mem_map(self._context, c.byref(parameters), c.byref(memory)),
            "ucp_mem_map",
        )
        status = self._calls.ucp_rkey_pack(self._context, memory, c.byref(buffer), c.byref(size))
        if status != OK:
            self._calls.ucp_mem_unmap(self._context, memory)
            self._ucp.check(status, "ucp_rkey_pack")
        rkey = c.string_at(buffer, size.value)
        self._calls.ucp_rkey_buffer_release(buffer)
        return Mapped(memory.value or 0, rkey)

    def unmap(self, mapped: Mapped) -> None:
        """Take memory back."""
        self._ucp.check(self._calls.ucp_mem_unmap(self._context, mapped.handle), "ucp_mem_unmap")

    # Endpoints.

    def connect(self, address: bytes) -> int:
        """Return a new endpoint. A garbled address would abort the process."""
        endpoint = abi.POINTER()
        given = c.create_string_buffer(address, len(address))
        parameters = abi.EndpointParams(
            mask=1 | 2 | 4,
            address=c.addressof(given),
            error_mode=abi.ERR_HANDLING_PEER,
            error_callback=self._callbacks[1],
        )
        self._ucp.check(
            self._calls.ucp_ep_create(self._worker, c.byref(parameters), c.byref(endpoint)),
            "ucp_ep_create",
        )
        return endpoint.value or 0

    def lanes(self, endpoint: int) -> set[str]:
        """Return the transports that an endpoint uses, by UCX's names."""
        lanes = (abi.Lane * abi.MAX_LANES)()
        attributes = abi.EndpointAttributes(
            mask=8, lanes=lanes, lanes_count=abi.MAX_LANES, lane_nbytes=c.sizeof(abi.Lane)
        )
        self._ucp.check(self._calls.ucp_ep_query(endpoint, c.byref(attributes)), "ucp_ep_query")
        return {lane.transport.decode() for lane in lanes[: attributes.lanes_count]}

    def unpack(self, endpoint: int, rkey: bytes) -> int:
        """Return the handle of remote memory. A garbled key may abort the process."""
        handle = abi.POINTER()
        self._ucp.check(
            self._calls.ucp_ep_rkey_unpack(endpoint, rkey, c.byref(handle)), "ucp_ep_rkey_unpack"
        )
        return handle.value or 0

    def destroy_key(self, rkey: int) -> None:
        """Give the handle of remote memory back."""
        self._calls.ucp_rkey_destroy(rkey)

    def disconnect(self, endpoint: int, ended: Callable[[int], object]) -> None:
        """Close an endpoint by force.

        ``ended`` means little: a piece that UCX was given for CMA is copied even after that.
        """
        parameters = self._ending(ended)
        parameters.mask |= abi.OP_FLAGS
        parameters.flags = abi.CLOSE_FORCE
        request = self._calls.ucp_ep_close_nbx(endpoint, c.byref(parameters))
        self._judge(request, parameters)

    # Operations.

    def post(
        self,
        op: str,
        endpoint: int,
        local: Sequence[int],
        nbytes: Sequence[int],
        remote: Sequence[int],
        rkeys: Sequence[int],
        *,
        short: bool,
    ) -> tuple[list[int], int]:
        """Start to move pieces; only :meth:`flush` says when they are there.

        Args:
            op: ``"read"`` or ``"write"``.
            endpoint: The peer.
            local: Addresses here.
            nbytes: Lengths, none of them 0.
            remote: Addresses there.
            rkeys: Handles of the memory there.
            short: Keep the interpreter's lock: giving it away for every small piece costs more,
                and where another thread computes, it takes milliseconds to come back.

        Returns:
            UCX's requests, to be given to :meth:`free` once they have ended; and OK, or the status
            of a piece that was refused.
        """
        calls = self._short if short else self._calls
        function = calls.ucp_get_nbx if op == "read" else calls.ucp_put_nbx
        # This runs once a piece, so no Python code does.
        posted = map(function, repeat(endpoint), local, nbytes, remote, rkeys, repeat(abi.POST))
        requests = list(filter(None, posted))
        if not requests or max(requests) < abi.FIRST_ERROR:
            return requests, OK
        refused = min(request for request in requests if request >= abi.FIRST_ERROR)
        return [r for r in requests if r < abi.FIRST_ERROR], refused - (1 << 64)

    def busy(self, requests: Sequence[int]) -> bool:
        """Whether any of them has not ended."""
        return IN_PROGRESS in map(self._short.ucp_request_check_status, requests)

    def free(self, requests: Sequence[int]) -> None:
        """Give requests back."""
        deque(map(self._short.ucp_request_free, requests), maxlen=0)

    def flush(self, endpoint: int, ended: Callable[[int], object]) -> None:
        """Call ``ended`` with the status once all that was posted before has been done."""
        parameters = self._ending(ended)
        request = self._calls.ucp_ep_flush_nbx(endpoint, c.byref(parameters))
        self._judge(request, parameters)

    def send(self, endpoint: int, sender: bytes, message: bytes) -> int:
        """Send a message, and return OK, or why it was not sent."""
        parameters = self._ending(_ignore, (sender, message))
        parameters.mask |= abi.OP_FLAGS
        parameters.flags = abi.AM_SEND_EAGER
        request = self._calls.ucp_am_send_nbx(
            endpoint, abi.AM_ID, sender, len(sender), message, len(message), c.byref(parameters)
        )
        return self._judge(request, parameters)

    # Progress.

    def progress(self) -> int:
        """Move things on; return how many did. Calls everything that is to be told."""
        moved = len(self._events)
        for _ in range(LOOKS_AT_ONCE):
            now = int(self._calls.ucp_worker_progress(self._worker))
            moved += now
            if not now or self._events:
                break
        while self._events:
            self._events.popleft()()
        return moved

    def arm(self) -> bool:
        """Make :attr:`event_fd` tell; False if there is something to progress at once."""
        if self._events:
            return False
        status = self._calls.ucp_worker_arm(self._worker)
        if status != BUSY:
            self._ucp.check(status, "ucp_worker_arm")
        return bool(status != BUSY)

    def _ending(self, ended: Callable[[int], object], kept: object = None) -> abi.RequestParams:
        """Note whom to tell, and what has to stay in memory until then."""
        self._next += 1
        self._ends[self._next] = (ended, kept)
        return abi.RequestParams(
            mask=abi.OP_CALLBACK | abi.OP_USER_DATA,
            callback=self._callbacks[2],
            user_data=self._next,
        )

    def _judge(self, request: int | None, parameters: abi.RequestParams) -> int:
        """Tell at once if no callback will; but from :meth:`progress`, as it always is."""
        if request is not None and request < abi.FIRST_ERROR:
            return IN_PROGRESS
        status = OK if request is None else request - (1 << 64)
        ended, _ = self._ends.pop(parameters.user_data)
        self._events.append(lambda: ended(status))
        return status

    # Called by UCX. What is raised here would be lost, so these only take notes.

    def _on_message(
        self, _: int, header: int, header_nbytes: int, data: int, nbytes: int, __: int
    ) -> int:
        sender = c.string_at(header, header_nbytes).decode(errors="replace")
        message = c.string_at(data, nbytes)
        self._events.append(lambda: self._received(sender, message))
        return OK

    def _on_failure(self, _: int, endpoint: int, status: int) -> None:
        self._events.append(lambda: self._failed(endpoint, status))

    def _on_end(self, request: int, status: int, token: int) -> None:
        self._short.ucp_request_free(request)
        ended, _ = self._ends.pop(token)
        self._events.append(lambda: ended(status))


def _ignore(status: int) -> None:
    """Nobody waits for this one."""
