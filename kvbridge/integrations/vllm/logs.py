"""Our lines of the log, among vLLM's."""

import logging


def log_beside_vllm() -> None:
    """Have what KVBridge logs written where vLLM writes, unless the user has set that up."""
    ours, theirs = logging.getLogger("kvbridge"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.propagate = theirs.propagate
