"""A small Llama-like decoder in exact arithmetic: values and pure functions over them.

The demo proves that a moved KV cache is as good as one that never moved, by comparing tokens of
engines that are split differently. Such a proof needs a model whose result does not depend on
*how* it was computed. Floating-point sums do: their last bits change with the order of addition,
hence with the number of ranks, of BLAS threads, of tokens per batch. So every number here lies on
a coarse grid, narrow enough that float64 adds up any of the products below without rounding:

- activations and weights are multiples of 2**-10 below 2**6: 16 bits, a product has 32;
- softmax weights are multiples of 2**-20 up to 1: 20 bits, times a value 36.

A float64 holds 53 bits, so sums of up to 2**17 such products are exact in whatever order.
"""

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

Floats = npt.NDArray[np.float64]

VOCABULARY_SIZE = 256  # bytes are the tokens
ROTARY_BASE = 10_000.0
EPSILON = 1e-5

GRID_BITS = 10
SOFTMAX_GRID_BITS = 20
GRID_LIMIT = 2.0**6 - 2.0**-GRID_BITS


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a model and the seed of its weights; equal configs are equal models.

    Attributes:
        layers: Number of decoder layers.
        kv_heads: Number of key/value heads per layer.
        query_heads_per_kv: Query heads that share one key/value head.
        head_dim: Numbers per head; even, because rotary embedding turns pairs.
        hidden: Width of the residual stream.
        mlp_hidden: Width inside the MLP.
        seed: Where all weights come from.
    """

    layers: int = 4
    kv_heads: int = 4
    query_heads_per_kv: int = 4
    head_dim: int = 16
    hidden: int = 128
    mlp_hidden: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that make no model.

        Raises:
            ValueError: If a size is below 1, the seed below 0 or ``head_dim`` odd.
        """
        for field in fields(self):
            least = 0 if field.name == "seed" else 1
            if getattr(self, field.name) < least:
                raise ValueError(
                    f"model: {field.name} is {getattr(self, field.name)}; it must be >= {least}"
                )
        if self.head_dim % 2:
            raise ValueError(f"model: head_dim is {self.head_dim}; it must be even")

    @property
    def query_heads(self) -> int:
        """Number of query heads per layer, over all ranks."""
        return self.kv_heads * self.query_heads_per_kv


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's matrices as one rank holds them; ``x @ matrix`` applies each.

    The first three are the rank's shard, the others are whole on every rank.
    """

    query: Floats  # [hidden, own query heads * head_dim]
    key: Floats  # [hidden, own kv heads * head_dim]
    value: Floats  # [hidden, own kv heads * head_dim]
    output: Floats  # [all query heads * head_dim, hidden]
    gate: Floats  # [hidden, mlp_hidden]
    up: Floats  # [hidden, mlp_hidden]
    down: Floats  # [mlp_hidden, hidden]


class _Matrix(IntEnum):
    """Which matrix a seed belongs to."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    OUTPUT = 3
    GATE = 4
    UP = 5
    DOWN = 6
    EMBEDDING = 7
    UNEMBEDDING = 8


# Gain of some matrices over "output as large as input". Plain random weights make a dull model: the
# last token alone decides the next one, and the cache hardly matters. Sharp attention (query, key)
# that outweighs the embedding in the residual stream lets a single wrong page change the tokens.
# (The embedding's rows are looked up and not summed: 8 / sqrt(256) makes them half as large as 1.)
_GAIN = {_Matrix.QUERY: 2.0, _Matrix.KEY: 2.0, _Matrix.OUTPUT: 1.5, _Matrix.EMBEDDING: 8.0}


def on_grid(numbers: Floats, bits: int = GRID_BITS) -> Floats:
    """Round to multiples of ``2**-bits`` and clip to what the exact sums allow for."""
    step = 2.0**-bits
    return np.clip(np.rint(numbers / step) * step, -GRID_LIMIT, GRID_LIMIT)


def layer_weights(
    config: ModelConfig, layer: int, kv_heads: range, query_heads: range
) -> LayerWeights:
    """Make the shard of one layer that a rank with these heads holds.

    Each head's matrix has a seed of its own, so a rank makes its shard alone and gets the very
    numbers that the unsplit engine has there.

    Args:
        config: The model.
        layer: Global index of the layer.
        kv_heads: Global indices of the key/value heads of the rank.
        query_heads: Global indices of the query heads that it computes; may be empty.
    """
    hidden, head_dim, mlp_hidden = config.hidden, config.head_dim, config.mlp_hidden

    def heads(kind: _Matrix, owned: range) -> Floats:
        parts = [_random(config, kind, (hidden, head_dim), layer, head) for head in owned]
        return np.concatenate([np.empty((hidden, 0)), *parts], axis=1)

    return LayerWeights(
        query=heads(_Matrix.QUERY, query_heads),
        key=heads(_Matrix.KEY, kv_heads),
        value=heads(_Matrix.VALUE, kv_heads),
        output=_random(config, _Matrix.OUTPUT, (config.query_heads * head_dim, hidden), layer),
        gate=_random(config, _Matrix.GATE, (hidden, mlp_hidden), layer),
        up=_random(config, _Matrix.UP, (hidden, mlp_hidden), layer),
        down=_random(config, _Matrix.DOWN, (mlp_hidden, hidden), layer),
    )


def embedding(config: ModelConfig) -> Floats:
    """Make the token embedding, [vocabulary, hidden], which only the first stage needs."""
    return _random(config, _Matrix.EMBEDDING, (VOCABULARY_SIZE, config.hidden))


def unembedding(config: ModelConfig) -> Floats:
    """Make the projection to logits, [hidden, vocabulary], which only the last stage needs."""
    return _random(config, _Matrix.UNEMBEDDING, (config.hidden, VOCABULARY_SIZE))


def _random(
    config: ModelConfig, kind: _Matrix, shape: tuple[int, int], layer: int = 0, head: int = 0
) -> Floats:
    """Draw one matrix from a seed of its own, scaled by its gain and the products it sums."""
    generator = default_rng((config.seed, layer, int(kind), head))
    scale = _GAIN.get(kind, 1.0) / np.sqrt(shape[0])
    return on_grid(generator.standard_normal(shape) * scale)


def rms_norm(x: Floats) -> Floats:
    """Scale each row of [tokens, hidden] to unit mean square.

    There is no gain vector: with random weights it would be one more factor of the next matrix.
    """
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return on_grid(x / np.sqrt(mean_square + EPSILON))


def rotate(x: Floats, positions: npt.NDArray[np.int64]) -> Floats:
    """Apply rotary position embedding.

    Shape: x [tokens, heads, head_dim], positions [tokens], result as x.
    """
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-np.arange(half) / half)
    angle = positions[:, None, None] * frequency
    cosine, sine = on_grid(np.cos(angle)), on_grid(np.sin(angle))
    first, second = x[..., :half], x[..., half:]
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    return on_grid(np.concatenate(turned, axis=-1))


def attend(query: Floats, key: Floats, value: Floats, first_position: int) -> Floats:
    """Causal attention of one head.

    Shape: query [tokens, head_dim], key and value [context, head_dim], result as query. The
    queries sit at ``first_position`` and after, the context starts at position 0.
    """
    weights = attention_weights(query, key, first_position)
    # Divided last, because unnormalised weights keep both sums exact.
    return on_grid(weights @ value / weights.sum(axis=1, keepdims=True))


def attention_weights(query: Floats, key: Floats, first_position: int) -> Floats:
    """Return the softmax weights before normalisation; the largest of each row is 1.

    Shape: query [tokens, head_dim], key [context, head_dim], result [tokens, context].
    """
    scores = query @ key.T / np.sqrt(query.shape[1])
    positions = first_position + np.arange(len(query))
    scores[np.arange(len(key)) > positions[:, None]] = -np.inf
    return on_grid(np.exp(scores - scores.max(axis=1, keepdims=True)), SOFTMAX_GRID_BITS)


def swiglu(x: Floats, weights: LayerWeights) -> Floats:
    """The gated MLP, [tokens, hidden] to [tokens, hidden]."""
    gate = x @ weights.gate
    return on_grid(gate / (1.0 + np.exp(-gate)) * (x @ weights.up)) @ weights.down


def greedy_token(x: Floats, unembedding_matrix: Floats) -> int:
    """Return the most likely next token after the last row of [tokens, hidden]."""
    return int(np.argmax(rms_norm(x[-1:]) @ unembedding_matrix))
