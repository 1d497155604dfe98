"""What the public headers of libucp say: numbers, structures and functions, for ctypes.

Only the small part that one-sided transfers and messages need. UCX keeps the layouts by masks,
which say which fields are given.
"""

import ctypes as c

POINTER = c.c_void_p
# ``ucs_status_t`` is a packed enumeration: one byte, with anything in the rest of the register.
STATUS = c.c_int8
# Pointers from here on are no pointers but negative status codes.
FIRST_ERROR = (1 << 64) - 100

FEATURES_RMA_AM_WAKEUP = 2 | 64 | 16
THREAD_MODE_SERIALIZED = 1
ERR_HANDLING_PEER = 1
AM_ID = 7
AM_WHOLE_MESSAGE = 1
AM_SEND_EAGER = 2
CLOSE_FORCE = 1
OP_CALLBACK, OP_USER_DATA, OP_FLAGS, _OP_MEMORY_TYPE = 2, 4, 16, 64
_OP_MULTI_SEND = 1 << 19
_MEMORY_TYPE_HOST = 0
MAX_LANES = 64

Completed = c.CFUNCTYPE(None, POINTER, STATUS, POINTER)
Failed = c.CFUNCTYPE(None, POINTER, POINTER, STATUS)
Received = c.CFUNCTYPE(STATUS, POINTER, POINTER, c.c_size_t, POINTER, c.c_size_t, POINTER)


class Params(c.Structure):
    """Of ``ucp_init_version``."""

    _fields_ = [
        ("mask", c.c_uint64),
        ("features", c.c_uint64),
        ("unused", c.c_uint64 * 9),
    ]


class WorkerParams(c.Structure):
    """Of ``ucp_worker_create``."""

    _fields_ = [("mask", c.c_uint64), ("thread_mode", c.c_int), ("unused", c.c_uint64 * 23)]


class WorkerAttributes(c.Structure):
    """Of ``ucp_worker_query``."""

    _fields_ = [
        ("mask", c.c_uint64),
        ("thread_mode", c.c_int),
        ("address_flags", c.c_uint32),
        ("address", POINTER),
        ("address_nbytes", c.c_size_t),
        ("unused", c.c_uint64 * 6),
    ]


class EndpointParams(c.Structure):
    """Of ``ucp_ep_create``."""

    _fields_ = [
        ("mask", c.c_uint64),
        ("address", POINTER),
        ("error_mode", c.c_int),
        ("error_callback", Failed),
        ("error_argument", POINTER),
        ("unused", c.c_uint64 * 8),
    ]


class Lane(c.Structure):
    """One of those that ``ucp_ep_query`` lists."""

    _fields_ = [("transport", c.c_char_p), ("device", c.c_char_p)]


class EndpointAttributes(c.Structure):
    """Of ``ucp_ep_query``."""

    _fields_ = [
        ("mask", c.c_uint64),
        ("unused", c.c_byte * 288),
        ("lanes", c.POINTER(Lane)),
        ("lanes_count", c.c_uint),
        ("lane_nbytes", c.c_size_t),
        ("user_data", POINTER),
    ]


class MapParams(c.Structure):
    """Of ``ucp_mem_map``."""

    _fields_ = [
        ("mask", c.c_uint64),
        ("address", POINTER),
        ("nbytes", c.c_size_t),
        ("unused", c.c_uint64 * 3),
    ]


class RequestParams(c.Structure):
    """Of all calls that end later."""

    _fields_ = [
        ("mask", c.c_uint32),
        ("flags", c.c_uint32),
        ("request", POINTER),
        ("callback", Completed),
        ("datatype", c.c_uint64),
        ("user_data", POINTER),
        ("reply_buffer", POINTER),
        ("memory_type", c.c_int),
        ("unused", c.c_uint64 * 5),
    ]


class HandlerParams(c.Structure):
    """Of ``ucp_worker_set_am_recv_handler``."""

    _fields_ = [
        ("mask", c.c_uint64),
        ("id", c.c_uint),
        ("flags", c.c_uint32),
        ("callback", Received),
        ("argument", POINTER),
    ]


POST = c.byref(RequestParams(mask=_OP_MULTI_SEND | _OP_MEMORY_TYPE, memory_type=_MEMORY_TYPE_HOST))

PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {
    "ucp_get_version": (None, [POINTER, POINTER, POINTER]),
    "ucs_status_string": (c.c_char_p, [STATUS]),
    "ucp_config_read": (STATUS, [c.c_char_p, c.c_char_p, POINTER]),
    "ucp_config_modify": (STATUS, [POINTER, c.c_char_p, c.c_char_p]),
    "ucp_config_release": (None, [POINTER]),
    "ucp_init_version": (STATUS, [c.c_uint, c.c_uint, POINTER, POINTER, POINTER]),
    "ucp_cleanup": (None, [POINTER]),
    "ucp_worker_create": (STATUS, [POINTER, POINTER, POINTER]),
    "ucp_worker_query": (STATUS, [POINTER, POINTER]),
    "ucp_worker_release_address": (None, [POINTER, POINTER]),
    "ucp_worker_get_efd": (STATUS, [POINTER, POINTER]),
    "ucp_worker_arm": (STATUS, [POINTER]),
    "ucp_worker_progress": (c.c_uint, [POINTER]),
    "ucp_worker_set_am_recv_handler": (STATUS, [POINTER, POINTER]),
    "ucp_worker_destroy": (None, [POINTER]),
    "ucp_ep_create": (STATUS, [POINTER, POINTER, POINTER]),
    "ucp_ep_query": (STATUS, [POINTER, POINTER]),
    "ucp_ep_flush_nbx": (POINTER, [POINTER, POINTER]),
    "ucp_ep_close_nbx": (POINTER, [POINTER, POINTER]),
    "ucp_ep_rkey_unpack": (STATUS, [POINTER, c.c_char_p, POINTER]),
    "ucp_rkey_destroy": (None, [POINTER]),
    "ucp_am_send_nbx": (
        POINTER,
        [POINTER, c.c_uint, c.c_char_p, c.c_size_t, c.c_char_p, c.c_size_t, POINTER],
    ),
    "ucp_mem_map": (STATUS, [POINTER, POINTER, POINTER]),
    "ucp_mem_unmap": (STATUS, [POINTER, POINTER]),
    "ucp_rkey_pack": (STATUS, [POINTER, POINTER, POINTER, POINTER]),
    "ucp_rkey_buffer_release": (None, [POINTER]),
    "ucp_request_check_status": (STATUS, [POINTER]),
    "ucp_request_free": (None, [POINTER]),
    "ucp_get_nbx": (
        POINTER,
        [POINTER, POINTER, c.c_size_t, c.c_uint64, POINTER, POINTER],
    ),
    "ucp_put_nbx": (
        POINTER,
        [POINTER, POINTER, c.c_size_t, c.c_uint64, POINTER, POINTER],
    ),
}
