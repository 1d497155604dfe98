"""``kvbridge transports --probe``: what carries the bytes, and whether that is fast enough."""

from typing import Any

from kvbridge.bench import Case, Measurement, measure
from kvbridge.errors import KVBridgeError
from kvbridge.transport import Capabilities, get_transport

CASES = [
    Case("read", 1 << 20, "contiguous", 32 << 20),
    Case("write", 1 << 20, "contiguous", 32 << 20),
]
RUNS = 5

# Least share of a memcpy of the same bytes, for pieces of 1 MiB. A quiet machine gives several
# times as much (measured on two cores: CMA 0.8 to 1.1, TCP over loopback 0.05 to 0.2), a busy one
# less. What RDMA gives depends on the device, so there is no number for it.
LEAST_SHARE = {"memory": 0.1, "cma": 0.1, "shm": 0.1, "tcp": 0.02}
SAME_HOST = ("memory", "cma", "shm")


def probe(name: str) -> dict[str, Any]:
    """Move some bytes between two processes of this machine over one transport.

    Returns:
        ``path``, what each direction gave, and a list of ``warnings``; or ``not_measured`` with
        the reason.
    """
    can = get_transport(name)().capabilities
    if not (can.read or can.write):
        return {"not_measured": "it wraps another transport; probe that one"}
    try:
        found = measure({"transport": name}, CASES, runs=RUNS)
    except KVBridgeError as error:
        return {"not_measured": str(error)}
    path = found[0].path
    speeds: dict[str, Any] = {
        str(m.case.op): {"gbps": m.gbps.median, "of_memcpy": m.of_memcpy.median} for m in found
    }
    return {
        "path": path,
        **speeds,
        "warnings": [w for w in (lane_warning(can, path), *map(speed_warning, found)) if w],
    }


def lane_warning(can: Capabilities, path: str) -> str:
    """Say if a transport that can leave the owner alone does not do so within a host."""
    if not can.owner_passive or path in (*SAME_HOST, "rdma"):
        return ""
    return (
        f"the bytes took {path}, although both processes are on this host: either the kernel lets "
        "none read the other's memory (transport 'local' then says why), or a variable such as "
        "UCX_TLS or UCX_RNDV_THRESH is set"
    )


def speed_warning(measured: Measurement) -> str:
    """Say if a lane gives far less than it should."""
    least = LEAST_SHARE.get(measured.path, 0.0)
    share = measured.of_memcpy.high  # the better runs: a busy machine makes the others slow
    if share >= least:
        return ""
    return (
        f"{measured.case.op}s reach {share:.2g} of a memcpy of the same bytes, and over "
        f"{measured.path} it should be {least:g} at the very least; is the machine busy?"
    )


def words(probed: dict[str, Any]) -> list[str]:
    """Return the lines that tell what came out."""
    if "not_measured" in probed:
        return [f"not measured: {probed['not_measured']}"]
    speeds = ", ".join(
        f"{op}s {probed[op]['gbps']:.2g} GB/s ({probed[op]['of_memcpy']:.2g} of memcpy)"
        for op in ("read", "write")
        if op in probed
    )
    return [
        f"carried by {probed['path']}: {speeds}",
        *(f"warning: {warning}" for warning in probed["warnings"]),
    ]
