"""The frame around agent info: whatever was damaged is refused, with one kind of error."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import TransportError
from kvbridge.transport import frame, open_agent_info, seal_agent_info

NAMES = st.text("ab:1é\0", max_size=20)
PAYLOADS = st.binary(max_size=200)


@given(name=NAMES, payload=PAYLOADS)
def test_what_was_sealed_comes_back(name: str, payload: bytes) -> None:
    assert open_agent_info(name, seal_agent_info(name, payload)) == payload


@given(payload=PAYLOADS, data=st.data())
def test_one_flipped_bit_is_found(payload: bytes, data: st.DataObject) -> None:
    sealed = bytearray(seal_agent_info("mine", payload))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransportError):
        open_agent_info("mine", bytes(sealed))


@given(payload=PAYLOADS, data=st.data())
def test_a_cut_or_longer_frame_is_found(payload: bytes, data: st.DataObject) -> None:
    sealed = seal_agent_info("mine", payload)
    keep = data.draw(st.integers(0, len(sealed) - 1))
    for wrong in (sealed[:keep], sealed + sealed[:1]):
        with pytest.raises(TransportError):
            open_agent_info("mine", wrong)


@given(noise=st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(TransportError):
        open_agent_info("mine", noise)


@pytest.mark.parametrize(
    "value", [None, 1, [], [1, "mine", b""], [1, "mine", b"", b"", b""], ["1", "mine", b"", b""]]
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TransportError, match="garbled"):
        open_agent_info("mine", msgspec.msgpack.encode(value))


def test_another_transport_is_named() -> None:
    with pytest.raises(TransportError, match=r"'theirs'.*'mine'"):
        open_agent_info("mine", seal_agent_info("theirs", b"payload"))


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "FRAME_VERSION", 7)
    sealed = seal_agent_info("mine", b"payload")
    monkeypatch.undo()
    with pytest.raises(TransportError, match="version 7, this side reads 1"):
        open_agent_info("mine", sealed)


def test_a_frame_that_is_too_large_is_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "FRAME_MAX_BYTES", 100)
    with pytest.raises(TransportError, match="larger than the 100 allowed"):
        open_agent_info("mine", seal_agent_info("mine", bytes(101)))


def test_name_and_payload_cannot_trade_bytes() -> None:
    """The digest covers where one part ends, not only what both hold together."""
    assert frame._digest(1, "a", b"b:x") != frame._digest(1, "a:b", b"x")
    assert frame._digest(1, "a", b"1:x") != frame._digest(1, "a:1", b"x")
