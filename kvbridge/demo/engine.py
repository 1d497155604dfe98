"""One rank of a demo engine, and the unsplit engine that every other must agree with.

As in real disaggregated serving the prefill engine computes the cache of all prompt tokens but the
last. The decode engine runs that one itself: it is the step that yields the first new token. So a
prompt of one byte moves nothing.

Whoever starts ranks as processes should set ``OPENBLAS_NUM_THREADS=1`` for them: the matrices are
small, and the threads of several ranks get into each other's way (on two busy cores a prefill of
600 bytes took 11 s instead of 1). The results are the same.
"""

from collections.abc import Sequence

import numpy as np

from kvbridge.demo import model
from kvbridge.demo.cache import PagedCache
from kvbridge.demo.collective import Group
from kvbridge.demo.model import Floats, LayerWeights, ModelConfig
from kvbridge.demo.shape import EngineShape, head_range, layer_range, query_heads

# Bounds the memory of a long prompt; the results do not depend on it, as sums are exact.
PREFILL_CHUNK_TOKENS = 128


class RankEngine:
    """The layers and heads of one rank: its weights, its cache and its part in every step.

    All ranks of an engine make the same calls with the same arguments, in lock-step; each call
    ends when this rank's part is done.

    Attributes:
        config: The model.
        shape: The split and the cache layout of the engine.
        group: This rank's place and its links.
        layers: Global indices of the layers held.
        kv_heads: Global indices of the KV heads held.
        query_heads: Global indices of the query heads computed; may be empty.
        cache: The KV pages, poisoned until written.
    """

    def __init__(self, config: ModelConfig, shape: EngineShape, group: Group, pages: int) -> None:
        """Make the weights and the empty cache of the rank that ``group`` says.

        Args:
            config: The model, the same on all ranks.
            shape: The engine's shape, the same on all ranks.
            group: From :func:`~kvbridge.demo.collective.connect_ranks`; ``Group()`` when alone.
            pages: Number of pages in the cache.

        Raises:
            ValueError: If the group is not of this shape, there are more stages than layers, or
                no pages.
        """
        if (group.pp, group.tp) != (shape.pp, shape.tp):
            raise ValueError(
                f"rank {group.rank} of an engine with {shape}:"
                f" its group has tp={group.tp},pp={group.pp}"
            )
        stage, rank = group.rank
        self.config, self.shape, self.group = config, shape, group
        self.layers = layer_range(config.layers, shape.pp, stage)
        self.kv_heads = head_range(config.kv_heads, shape.tp, rank)
        self.query_heads = query_heads(config.kv_heads, config.query_heads_per_kv, shape.tp, rank)
        self.cache = PagedCache(self.layers, self.kv_heads, config.head_dim, shape, pages)
        self._weights = {
            layer: model.layer_weights(config, layer, self.kv_heads, self.query_heads)
            for layer in self.layers
        }
        self._embedding = model.embedding(config) if group.is_first else None
        self._unembedding = model.unembedding(config) if group.is_last else None

    def prefill(self, page_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Compute the cache of the first tokens of a sequence; of none, if none are given.

        Args:
            page_ids: Pages of the sequence, in order.
            tokens: The tokens from position 0 on.

        Raises:
            ValueError: If the pages do not hold the tokens.
            TimeoutError: If another rank kept this one waiting for too long.
            ConnectionError: If another rank is gone.
        """
        for start in range(0, len(tokens), PREFILL_CHUNK_TOKENS):
            self._run_stage(page_ids, start, tokens[start : start + PREFILL_CHUNK_TOKENS])

    def decode(self, page_ids: Sequence[int], position: int, token: int) -> int:
        """Run one token and return the next, on every rank.

        Args:
            page_ids: Pages of the sequence, in order.
            position: Position of the token; the cache holds all before it.
            token: The token there.

        Raises:
            ValueError: If the pages do not reach so far.
            TimeoutError: If another rank kept this one waiting for too long.
            ConnectionError: If another rank is gone.
        """
        x = self._run_stage(page_ids, position, [token])
        chosen = None
        if self._unembedding is not None:
            chosen = np.array([[model.greedy_token(x, self._unembedding)]], np.float64)
        return int(self.group.share_from_last(chosen)[0, 0])

    def _run_stage(self, page_ids: Sequence[int], start: int, tokens: Sequence[int]) -> Floats:
        """Run this stage's layers on consecutive tokens and hand the result on."""
        if self._embedding is not None:
            x = self._embedding[list(tokens)]
        else:
            x = self.group.receive_previous()
        for layer, weights in self._weights.items():
            heads = self._attention(layer, weights, model.rms_norm(x), page_ids, start)
            x = model.on_grid(x + np.concatenate(self.group.all_gather(heads), 1) @ weights.output)
            x = model.on_grid(x + model.swiglu(model.rms_norm(x), weights))
        if not self.group.is_last:
            self.group.send_next(x)
        return x

    def _attention(
        self, layer: int, weights: LayerWeights, x: Floats, page_ids: Sequence[int], start: int
    ) -> Floats:
        """Cache K and V of the own heads and attend with the own query heads.

        Shape: x [tokens, hidden], result [tokens, own query heads * head_dim].
        """
        head_dim, per_kv = self.config.head_dim, self.config.query_heads_per_kv
        query, key, value = (
            model.on_grid(x @ matrix).reshape(len(x), -1, head_dim)
            for matrix in (weights.query, weights.key, weights.value)
        )
        self.cache.write(layer, page_ids, start, key.astype(np.float16), value.astype(np.float16))
        # Read back even what was just computed: the cache is the only source, so its bytes matter.
        # Keys are turned on their way out, not on their way in. Attention is a sum over a set, so
        # a decoder that caches turned keys is blind to pages that changed places.
        end = start + len(x)
        cached = self.cache.gather(layer, page_ids, end)
        keys, values = (part.astype(np.float64) for part in cached)
        query = model.rotate(query, np.arange(start, end))
        keys = model.rotate(keys, np.arange(end))
        outputs = [np.empty((len(x), 0))]
        for index, head in enumerate(self.query_heads):
            own = head // per_kv - self.kv_heads.start
            outputs.append(model.attend(query[:, index], keys[:, own], values[:, own], start))
        return np.concatenate(outputs, axis=1)


def pages_needed(prompt_tokens: int, new_tokens: int, page: int) -> int:
    """Return how many pages of ``page`` tokens a request fills.

    The last new token is never run, so it needs no room.
    """
    return -(-(prompt_tokens + new_tokens - 1) // page)


def generate(engine: RankEngine, page_ids: Sequence[int], prompt: bytes, tokens: int) -> list[int]:
    """Continue a prompt whose cache is there, up to and without its last token.

    Args:
        engine: One rank; all others must do the same.
        page_ids: Pages of the sequence, in order.
        prompt: The whole prompt, not empty.
        tokens: Number of new tokens wanted.

    Returns:
        The new tokens.

    Raises:
        ValueError: If the prompt is empty or the pages do not suffice.
        TimeoutError: If another rank kept this one waiting for too long.
        ConnectionError: If another rank is gone.
    """
    if not prompt:
        raise ValueError("the prompt is empty; decoding needs at least one byte")
    sequence = list(prompt)
    for position in range(len(prompt) - 1, len(prompt) - 1 + tokens):
        sequence.append(engine.decode(page_ids, position, sequence[position]))
    return sequence[len(prompt) :]
