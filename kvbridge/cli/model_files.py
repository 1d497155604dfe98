"""Models as small data files: what each layer caches, and where the figures come from.

A file is one JSON object::

    {
      "name": "gemma-3-27b",
      "source": "where the figures were published",
      "dtype": "bfloat16",
      "layers": 62,
      "pattern": ["local", "local", "local", "local", "local", "global"],
      "kinds": {
        "local": {"kind": "sliding_window", "kv_heads": 16, "head_dim": 128, "window_tokens": 1024},
        "global": {"kind": "attention", "kv_heads": 16, "head_dim": 128}
      }
    }

``pattern`` names the kind of each layer and is repeated until there are ``layers`` of them. The
files in ``models/`` are the presets.
"""

import difflib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvbridge.errors import ConfigError

# The upper bounds are far above any model; they keep a slip of the keyboard from running for hours.
Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]

ITEM_BYTES = {"float8_e4m3": 1, "bfloat16": 2, "float16": 2, "float32": 4}


class _Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """What one kind of layer caches."""


class Attention(_Kind, frozen=True, tag="attention"):
    """K and V of every token.

    Attributes:
        kv_heads: KV heads of the model.
        head_dim: Elements of K, and of V, of one head and token.
    """

    kv_heads: Positive
    head_dim: Positive


class SlidingWindow(Attention, frozen=True, tag="sliding_window"):
    """K and V of the last ``window_tokens`` tokens."""

    window_tokens: Positive


class Chunked(Attention, frozen=True, tag="chunked"):
    """K and V of the tokens of one chunk of ``window_tokens``."""

    window_tokens: Positive


class Latent(_Kind, frozen=True, tag="mla"):
    """One compressed vector of every token, which every rank holds whole (MLA).

    Attributes:
        latent_dim: Elements of the compressed keys and values.
        rope_dim: Elements of the key part that carries positions.
    """

    latent_dim: Positive
    rope_dim: Positive


class GatedDeltaNet(_Kind, frozen=True, tag="gated_delta_net"):
    """State of one sequence, whatever its length.

    Attributes:
        key_heads: Heads of Q and of K.
        value_heads: Heads of V and of the temporal state.
        key_head_dim: Elements of a key head.
        value_head_dim: Elements of a value head.
        conv_kernel: Width of the convolution, which remembers one input less.
    """

    key_heads: Positive
    value_heads: Positive
    key_head_dim: Positive
    value_head_dim: Positive
    conv_kernel: Annotated[int, msgspec.Meta(ge=2, le=1_000)]


class Mamba2(_Kind, frozen=True, tag="mamba2"):
    """State of one sequence, whatever its length.

    Attributes:
        heads: Heads of x and of the temporal state.
        head_dim: Elements of a head.
        state_size: Elements of B, and of C, of one group.
        groups: Groups of heads that share B and C.
        conv_kernel: Width of the convolution, which remembers one input less.
    """

    heads: Positive
    head_dim: Positive
    state_size: Positive
    groups: Positive
    conv_kernel: Annotated[int, msgspec.Meta(ge=2, le=1_000)]


class NoCache(_Kind, frozen=True, tag="none"):
    """A layer that caches nothing, such as one of a feed-forward network alone."""


LayerKind = Attention | SlidingWindow | Chunked | Latent | GatedDeltaNet | Mamba2 | NoCache


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the layers of a model cache.

    Attributes:
        name: Name of the model.
        source: Where its figures were published.
        dtype: Element type of everything that is cached.
        layers: Number of layers.
        pattern: Kind of each layer, by its name in ``kinds``; repeated as often as needed.
        kinds: The kinds of layers.
    """

    name: str
    source: str
    dtype: Literal["float8_e4m3", "bfloat16", "float16", "float32"]
    layers: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    pattern: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    kinds: dict[str, LayerKind]

    def __post_init__(self) -> None:
        """Refuse patterns that name kinds which do not exist, and models without a cache.

        Raises:
            ValueError: It is one of these.
        """
        for name in self.pattern:
            if name not in self.kinds:
                raise ValueError(
                    f"pattern names {name!r}, kinds has only: {', '.join(sorted(self.kinds))}"
                )

        cached = self.pattern[: self.layers]
        if all(isinstance(self.kinds[name], NoCache) for name in cached):
            raise ValueError("pattern: no layer caches anything")

    def kind_name(self, layer: int) -> str:
        """Return the name of a layer's kind."""
        return self.pattern[layer % len(self.pattern)]


def known_models() -> list[str]:
    """Return the names of the presets."""
    found = (files("kvbridge.cli") / "models").iterdir()
    return sorted(f.name.removesuffix(".json") for f in found if f.name.endswith(".json"))


def load_model(name: str) -> ModelFile:
    """Read a preset by its name, or a file by a path that ends in ``.json``.

    Raises:
        ConfigError: There is no such preset or file, or it is no model; names the field.
    """
    if name.endswith(".json"):
        try:
            return _decode(Path(name).read_bytes(), name)
        except OSError as error:
            raise ConfigError(f"cannot read model {name}: {error.strerror}") from error
    known = known_models()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"model {name!r} is unknown; {hint}known: {', '.join(known)}, or a path to FILE.json"
        )
    return _decode((files("kvbridge.cli") / "models" / f"{name}.json").read_bytes(), name)


def _decode(text: bytes, where: str) -> ModelFile:
    try:
        return msgspec.json.decode(text, type=ModelFile)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"model {where}: {error}") from error
