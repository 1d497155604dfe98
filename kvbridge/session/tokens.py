"""Whether a request is the one that blocks were computed for."""

from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice

import numpy as np

_ID = np.dtype("<i8")
_DIGEST_NBYTES = 16


def ids_of_tokens(tokens: Iterable[int], count: int) -> bytes:
    """Return the ids of the first tokens of a request, as they are sent and digested.

    Args:
        tokens: Ids of its tokens, at least so many.
        count: How many of them count.
    """
    return np.fromiter(islice(tokens, count), np.int64, count).astype(_ID, copy=False).tobytes()


def digest_of_tokens(tokens: Iterable[int], count: int) -> str:
    """Return what tells the first tokens of a request from those of any other one.

    Args:
        tokens: Ids of its tokens, at least so many.
        count: How many of them count.
    """
    return digest_of_ids(ids_of_tokens(tokens, count), count)


def digest_of_ids(ids: bytes, count: int) -> str:
    """Return the same of ids as :func:`ids_of_tokens` returns them, of so many or more."""
    return blake2b(memoryview(ids)[: count * _ID.itemsize], digest_size=_DIGEST_NBYTES).hexdigest()
