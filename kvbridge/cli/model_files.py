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

import codecs
import difflib
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kvbridge.errors import ConfigError

# The upper bounds are far above any model; they keep a slip of the keyboard from running for hours.
Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]

FILE_MAX_BYTES = 1 << 20

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


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
KINDS: dict[str, type[LayerKind]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (Attention, SlidingWindow, Chunked, Latent, GatedDeltaNet, Mamba2, NoCache)
}


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the layers of a model cache.

    Attributes:
        name: Name of the model; up to 100 characters, all of which can be shown.
        source: Where its figures were published, in characters that can be shown.
        dtype: Element type of everything that is cached, a key of ``ITEM_BYTES``.
        layers: Number of layers.
        pattern: Kind of each layer, by its name in ``kinds``; repeated as often as needed.
        kinds: The kinds of layers.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    source: str
    dtype: str
    layers: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    pattern: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    kinds: dict[str, LayerKind]

    def __post_init__(self) -> None:
        """Refuse words that mean nothing or cannot be shown, and models without a cache.

        Raises:
            ValueError: It is one of these.
        """
        for field in ("name", "source"):
            if not getattr(self, field).isprintable():
                raise ValueError(f"{field} {getattr(self, field)!r} holds control characters")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(
                f"dtype {self.dtype!r} is unknown; known: {', '.join(sorted(ITEM_BYTES))}"
            )
        for name in self.pattern:
            if name not in self.kinds:
                raise ValueError(
                    f"pattern names {name!r}, kinds has only: "
                    f"{', '.join(sorted(self.kinds)) or 'nothing'}"
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
            with Path(name).open("rb") as file:
                text = file.read(FILE_MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"cannot read model {name}: {error.strerror}") from error
        return _decode(text, name)
    known = known_models()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"model {name!r} is unknown; {hint}known: {', '.join(known)}, or a path to FILE.json"
        )
    return _decode((files("kvbridge.cli") / "models" / f"{name}.json").read_bytes(), name)


def _decode(text: bytes, where: str) -> ModelFile:
    if len(text) > FILE_MAX_BYTES:
        raise ConfigError(f"model {where} has more than {FILE_MAX_BYTES:,} bytes; is it a model?")
    if text.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"model {where} starts with a byte order mark; save it as plain UTF-8")
    try:
        content = msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"model {where}: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("kinds"), dict):
        kinds = {
            name: _kind(kind, f"model {where}: kinds[{name!r}]")
            for name, kind in content["kinds"].items()
        }
        content = {**content, "kinds": kinds}
    return _convert(content, ModelFile, f"model {where}")


def _kind(content: Any, where: str) -> LayerKind:
    tag = content.get("kind") if isinstance(content, dict) else content
    if not isinstance(content, dict) or not isinstance(tag, str) or tag not in KINDS:
        raise ConfigError(f"{where}: kind {tag!r} is unknown; known: {', '.join(KINDS)}")
    return _convert(content, KINDS[tag], where)


_T = TypeVar("_T")


def _convert(content: Any, wanted: type[_T], where: str) -> _T:
    """Check decoded JSON; what is refused is named with its value."""
    try:
        return msgspec.convert(content, wanted)
    except msgspec.ValidationError as error:
        field = re.search(r"`\$\.(\w+)`$", str(error))
        value = f", which is {content[field[1]]!r:.40}" if field and field[1] in content else ""
        raise ConfigError(f"{where}: {error}{value}") from error
