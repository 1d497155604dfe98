"""Whether a request is the one that blocks were computed for."""

from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice

import numpy as np

_DIGEST_NBYTES = 16


def digest_of_tokens(tokens: Iterable[int], count: int) -> str:
    """Return what tells the first tokens of a request from those of any other one.

    Args:
        tokens: Ids of its tokens, at least so many.
        count: How many of them count.
    """
    ids = np.fromiter(islice(tokens, count), np.int64, count)
    return blake2b(ids.astype("<i8", copy=False).tobytes(), digest_size=_DIGEST_NBYTES).hexdigest()
