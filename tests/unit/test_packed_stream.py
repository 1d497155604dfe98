"""The stream of a packed write: its order, its digest, its parts."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvbridge.errors import HandshakeError
from kvbridge.handshake.messages import Packed, Want, decode_note
from kvbridge.handshake.wire import encode
from kvbridge.model.arrays import bytes_at
from kvbridge.plan import PackedStream


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def stream(*pieces: tuple[int, int, int]) -> PackedStream:
    """Return that of some pieces: where each is here, where it goes, how long it is."""
    here, goes_to, nbytes = zip(*pieces, strict=True) if pieces else ((), (), ())
    return PackedStream.of(u64(*here), u64(*goes_to), u64(*nbytes))


def test_pieces_are_in_the_order_of_where_they_go() -> None:
    made = stream((10, 900, 4), (30, 100, 8), (20, 500, 2))
    assert made.address.tolist() == [30, 20, 10]
    assert made.end.tolist() == [8, 10, 14]
    assert made.nbytes == 14


def test_nothing_is_an_empty_stream() -> None:
    made = stream()
    assert made.nbytes == 0
    assert list(made.cut(8)) == []
    assert made.digest != stream((10, 900, 4)).digest


def test_how_pieces_were_merged_is_each_sides_own_business() -> None:
    """One side has joined what touches, the other has cut it elsewhere, in another order."""
    one = stream((10, 100, 12), (50, 200, 8))
    other = stream((70, 204, 4), (0, 100, 3), (3, 103, 9), (90, 200, 4))
    assert (one.digest, one.nbytes) == (other.digest, other.nbytes)


@pytest.mark.parametrize(
    "other",
    [
        [(10, 101, 12), (50, 200, 8)],
        [(10, 100, 12), (50, 200, 9)],
        [(10, 100, 12)],
        [(10, 100, 4), (10, 108, 4), (50, 200, 8)],
        [(10, 100, 8), (50, 196, 12)],
    ],
    ids=["another place", "longer", "less", "a hole", "cut elsewhere, not where they touch"],
)
def test_other_bytes_have_another_digest(other: list[tuple[int, int, int]]) -> None:
    assert stream((10, 100, 12), (50, 200, 8)).digest != stream(*other).digest


def test_where_they_are_here_is_no_part_of_the_digest() -> None:
    assert stream((10, 100, 12)).digest == stream((7000, 100, 12)).digest


def test_parts_end_where_pieces_do() -> None:
    made = stream((0, 0, 4), (10, 10, 4), (20, 20, 4), (30, 30, 4))
    assert list(made.cut(9)) == [(0, 8), (8, 16)]
    assert list(made.cut(8)) == [(0, 8), (8, 16)]
    assert list(made.cut(1000)) == [(0, 16)]


def test_a_piece_longer_than_a_part_is_cut_at_a_multiple_that_keeps_cells_whole() -> None:
    made = stream((0, 0, 10), (1000, 1000, 300), (2000, 2000, 5))
    parts = list(made.cut(100))
    assert parts == [(0, 10), (10, 74), (74, 138), (138, 202), (202, 266), (266, 315)]
    assert [made.count(*part) for part in parts] == [1, 1, 1, 1, 1, 2]
    gather = made.gather(202, 266, 5000)
    assert gather.source_address.tolist() == [1192]
    assert (gather.target_address.tolist(), gather.nbytes.tolist()) == ([5000], [64])
    last = made.gather(266, 315, 5000)
    assert last.source_address.tolist() == [1256, 2000]
    assert (last.target_address.tolist(), last.nbytes.tolist()) == ([5000, 5044], [44, 5])


def test_parts_of_a_few_bytes_are_cut_anywhere() -> None:
    assert list(stream((0, 0, 5)).cut(2)) == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize("most_nbytes", [1, 7, 64, 100, 4096])
def test_what_is_gathered_and_scattered_is_where_it_belongs(most_nbytes: int) -> None:
    """In real memory: cells of 24 bytes, every other one, in reverse."""
    source = np.random.default_rng(1).integers(0, 255, 4096, np.uint8)
    target, here, there = (np.zeros(4096, np.uint8) for _ in range(3))
    at, goes = np.arange(0, 4000, 48)[::-1], np.arange(5, 4005, 48)
    nbytes = np.full(at.size, 24, np.uint64)
    goes_to = (goes + target.ctypes.data).astype(np.uint64)
    given = PackedStream.of((at + source.ctypes.data).astype(np.uint64), goes_to, nbytes)
    wanted = PackedStream.of(goes_to, goes_to, nbytes)
    assert given.digest == wanted.digest
    for start, stop in wanted.cut(most_nbytes):
        memory = [bytes_at(source.ctypes.data, source.size)]
        given.gather(start, stop, here.ctypes.data).apply(memory, [here])
        there[: stop - start] = here[: stop - start]
        memory = [bytes_at(target.ctypes.data, target.size)]
        wanted.scatter(start, stop, there.ctypes.data).apply([there], memory)
    expected = np.zeros(4096, np.uint8)
    for a, b in zip(at.tolist(), goes.tolist(), strict=True):
        expected[b : b + 24] = source[a : a + 24]
    assert (target == expected).all()


@pytest.mark.parametrize(
    ("start", "stop", "address"),
    [(-1, 4, 64), (4, 4, 64), (8, 4, 64), (0, 4, 0), (0, 4, -64), (0, 4, 1 << 63)],
)
def test_a_part_that_cannot_be_is_refused_when_it_is_heard(
    start: int, stop: int, address: int
) -> None:
    want = Want(
        1, "r", "d", "i", 0, (0, 0), ("127.0.0.1", 1), 7, blocks=(), start_token=0, end_token=4,
        timeout_s=1.0, packed=Packed(start, stop, address, b"12345678"),
    )  # fmt: skip
    with pytest.raises(HandshakeError, match="are wanted at"):
        decode_note(encode(want))
