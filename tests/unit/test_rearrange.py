"""Pieces put in their places by one array assignment, in numpy and in torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbridge.errors import PlanError
from kvbridge.plan import Rearrangement, rearrange

Bytes = NDArray[np.uint8]
LIBRARIES: dict[str, Callable[[Bytes], Any]] = {
    "numpy": lambda array: array,
    "torch": torch.from_numpy,
}


def address(array: Bytes) -> int:
    start: int = array.__array_interface__["data"][0]
    return start


def rearrangement(
    source: Bytes, target: Bytes, pieces: list[tuple[int, int, int]]
) -> Rearrangement:
    here, there, nbytes = np.array(pieces, np.uint64).reshape(-1, 3).T
    return Rearrangement(
        here + np.uint64(address(source)), there + np.uint64(address(target)), nbytes
    )


@st.composite
def some_pieces(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Draw pieces as (from, to, bytes), in steps of some width; targets do not overlap."""
    width = draw(st.sampled_from([1, 2, 3, 16, 256]))
    lengths = draw(st.lists(st.integers(0, 9), max_size=12))
    order = draw(st.permutations(range(len(lengths))))
    at = np.zeros(len(lengths), int)
    at[list(order)] = np.cumsum([lengths[i] for i in order]) - [lengths[i] for i in order]
    starts = [draw(st.integers(0, 20)) for _ in lengths]
    return width, [
        (start * width, int(to) * width, length * width)
        for start, to, length in zip(starts, at, lengths, strict=True)
    ]


@pytest.mark.parametrize("library", LIBRARIES)
@given(drawn=some_pieces())
def test_every_piece_lands_in_its_place(
    library: str, drawn: tuple[int, list[tuple[int, int, int]]]
) -> None:
    width, pieces = drawn
    source = np.random.default_rng(0).integers(0, 255, 32 * width + 7, dtype=np.uint8)
    target = np.full(128 * width + 5, 0xC3, np.uint8)
    expected = target.copy()
    for here, there, nbytes in pieces:
        expected[there : there + nbytes] = source[here : here + nbytes]
    as_buffer = LIBRARIES[library]
    rearrangement(source, target, pieces).apply([as_buffer(source)], [as_buffer(target)])
    assert (target == expected).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_pieces_of_several_buffers_find_theirs(library: str) -> None:
    sources = [np.full(64, i + 1, np.uint8) for i in range(2)]
    targets = [np.zeros(64, np.uint8) for _ in range(3)]
    pieces = [(0, 8, 2, 16), (1, 0, 0, 8), (1, 32, 1, 0)]
    whole = Rearrangement(
        *(
            np.array(column, np.uint64)
            for column in zip(
                *(
                    (address(sources[s]) + here, address(targets[t]) + there, 8)
                    for s, here, t, there in pieces
                ),
                strict=True,
            )
        )
    )
    as_buffer = LIBRARIES[library]
    whole.apply([as_buffer(s) for s in sources], [as_buffer(t) for t in targets])
    assert [np.flatnonzero(t).tolist() for t in targets] == [
        list(range(8, 16)),
        list(range(8)),
        list(range(16, 24)),
    ]
    assert (targets[2][16:24] == 1).all()
    assert whole.total_nbytes == 24


ORDERS = ("from one run", "into one run", "from and into anywhere")


@pytest.mark.parametrize("order", ORDERS)
def test_more_rows_than_go_through_at_once(order: str) -> None:
    width, count = 64, 3 * rearrange.BETWEEN_NBYTES // 64 + 5
    rng = np.random.default_rng(3)
    source = rng.integers(0, 255, width * count, np.uint8)
    target = np.zeros(width * count, np.uint8)
    there = np.arange(count) if order == ORDERS[1] else rng.permutation(count)
    here = np.arange(count) if order == ORDERS[0] else rng.permutation(count)
    pieces = np.stack([here * width, there * width, np.full(count, width)], axis=1)
    rearrangement(source, target, pieces.tolist()).apply([source], [target])
    rows = source.reshape(count, width)
    assert (target.reshape(count, width)[there] == rows[here]).all()


def test_a_buffer_is_rearranged_within_itself() -> None:
    memory = np.arange(32, dtype=np.uint8)
    pieces = [(0, 8, 8), (8, 0, 8), (16, 24, 8), (24, 16, 8)]
    rearrangement(memory, memory, pieces).apply([memory], [memory])
    assert memory.tolist() == [*range(8, 16), *range(8), *range(24, 32), *range(16, 24)]


def test_nothing_is_rearranged_at_all() -> None:
    Rearrangement.nothing().apply([], [])


def test_a_piece_in_no_buffer_is_refused_before_anything_moves() -> None:
    source, target = np.ones(16, np.uint8), np.zeros(16, np.uint8)
    with pytest.raises(PlanError, match=r"piece 1 .* none of the 1 target buffers"):
        rearrangement(source, target, [(0, 0, 8), (0, 12, 8)]).apply([source], [target])
    assert not target.any()


@pytest.mark.parametrize("wrong", [np.zeros((4, 4), np.uint8), np.zeros(4, np.float32)])
def test_buffers_are_flat_bytes(wrong: NDArray[Any]) -> None:
    with pytest.raises(PlanError, match="flat uint8"):
        Rearrangement.nothing().apply([wrong], [])
