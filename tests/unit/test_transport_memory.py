"""Bounds and users of registered memory, against a check that looks at every region."""

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import MemoryBusyError, OutOfBoundsError, TransportError
from kvbridge.transport import Descriptors, LocalMemory, Region, RegionTable, mappings


def pieces(address: list[int], nbytes: list[int]) -> Descriptors:
    return Descriptors(np.array(address, np.uint64), np.array(nbytes, np.uint64))


TOP = 1 << 64
KINDS = st.sampled_from([("dram", 0), ("cuda", 0), ("cuda", 1)])


@st.composite
def apart(draw: st.DrawFn) -> list[Region]:
    """Regions that touch at most, on any device, some at the very top of memory."""
    regions = []
    for kind, device in draw(st.sets(KINDS)):
        base = draw(st.sampled_from([0, 1000, TOP - 200]))
        for _ in range(draw(st.integers(1, 5))):
            base += draw(st.integers(0, 8))
            nbytes = draw(st.integers(1, 20))
            regions.append(Region(base, nbytes, kind, device))
            base += nbytes
    return draw(st.permutations(regions))


def brute_force(regions: list[Region], address: int, nbytes: int, where: tuple[str, int]) -> bool:
    return any(
        (r.memory_kind, r.device) == where
        and r.address <= address
        and address + nbytes <= r.address + r.nbytes
        for r in regions
    )


PIECE = st.tuples(
    st.one_of(st.integers(0, 200), st.integers(990, 1200), st.integers(TOP - 210, TOP - 1)),
    st.one_of(st.integers(0, 30), st.sampled_from([TOP - 1, TOP - 995, 1 << 63])),
)


@given(regions=apart(), piece=PIECE, where=KINDS)
def test_one_piece_is_inside_exactly_when_a_region_holds_it(
    regions: list[Region], piece: tuple[int, int], where: tuple[str, int]
) -> None:
    address, nbytes = piece
    descriptors = Descriptors(np.array([address], np.uint64), np.array([nbytes], np.uint64), *where)
    table = RegionTable(regions)
    if nbytes == 0:
        # Where nothing moves, it is enough that it does no harm: between two regions that touch,
        # and at the end of one, both answers are right.
        return
    if brute_force(regions, address, nbytes, where):
        found = table.regions[int(table.locate(descriptors, "us")[0])]
        assert brute_force([found], address, nbytes, where)
    else:
        with pytest.raises(OutOfBoundsError, match="descriptor 0 of 1"):
            table.locate(descriptors, "us")


@given(regions=apart(), data=st.data())
def test_many_pieces_are_refused_for_the_first_bad_one(
    regions: list[Region], data: st.DataObject
) -> None:
    where = data.draw(KINDS)
    drawn = data.draw(st.lists(PIECE.filter(lambda piece: piece[1] > 0), max_size=8))
    good = [brute_force(regions, address, nbytes, where) for address, nbytes in drawn]
    array = np.array(drawn, np.uint64).reshape(-1, 2)
    descriptors = Descriptors(array[:, 0], array[:, 1], *where)
    if all(good):
        assert len(RegionTable(regions).locate(descriptors, "us")) == len(drawn)
    else:
        with pytest.raises(OutOfBoundsError, match=f"descriptor {good.index(False)} of"):
            RegionTable(regions).locate(descriptors, "us")


@pytest.mark.parametrize(
    ("address", "nbytes", "inside"),
    [(1000, 100, 1), (1099, 1, 1), (1000, 101, 0), (1099, 2, 0), (999, 1, 0), (1100, 1, 0)],
)
def test_every_edge_of_a_region_counts(address: int, nbytes: int, inside: int) -> None:
    table = RegionTable([Region(1000, 100), Region(5000, 100)])
    if inside:
        assert list(table.locate(pieces([address], [nbytes]), "us")) == [0]
    else:
        with pytest.raises(OutOfBoundsError):
            table.locate(pieces([address], [nbytes]), "us")


def test_equal_addresses_of_two_devices_are_told_apart() -> None:
    table = RegionTable([Region(1000, 10, "cuda", device) for device in (0, 1)])
    for device in (0, 1):
        piece = Descriptors(np.array([1005]), np.array([5]), "cuda", device)
        found = table.regions[int(table.locate(piece, "us")[0])]
        assert found.device == device


def test_an_empty_piece_inside_is_fine() -> None:
    table = RegionTable([Region(1000, 10)])
    assert list(table.locate(pieces([1000, 1005], [0, 0]), "us")) == [0, 0]


def test_an_empty_table_holds_nothing_but_nothing() -> None:
    assert not len(RegionTable([]).locate(pieces([], []), "us"))
    with pytest.raises(OutOfBoundsError, match="0 registered regions of us"):
        RegionTable([]).locate(pieces([1], [1]), "us")


@given(regions=apart(), data=st.data())
def test_overlap_is_refused(regions: list[Region], data: st.DataObject) -> None:
    if not regions:
        return
    old = data.draw(st.sampled_from(regions))
    address = data.draw(st.integers(old.address, old.end - 1))
    nbytes = data.draw(st.integers(1, min(30, TOP - address)))
    new = Region(address, nbytes, old.memory_kind, old.device)
    with pytest.raises(OutOfBoundsError, match="overlap"):
        RegionTable([*regions, new])


@pytest.mark.parametrize(
    ("address", "nbytes", "said"),
    [
        ([1], [1, 2], "1 addresses but 2 lengths"),
        ([[1]], [[1]], "flat"),
        ([-1], [1], ">= 0"),
        ([1], [-1], ">= 0"),
        ([1.0], [1], "integers"),
        (["1"], [1], "integers"),
        ([None], [1], "integers"),
    ],
)
def test_wrong_descriptors_are_refused(address: list[int], nbytes: list[int], said: str) -> None:
    with pytest.raises(OutOfBoundsError, match=said):
        Descriptors(np.array(address), np.array(nbytes))


def test_descriptors_have_one_form() -> None:
    for values in ([1, 2], np.array([1, 2], np.int32), np.array([1, 0, 2], np.uint64)[::2]):
        made = Descriptors(values, values)  # type: ignore[arg-type]
        assert made.address.dtype == np.uint64
        assert made.address.flags.c_contiguous
        assert (list(made.address), len(made), made.total_nbytes) == ([1, 2], 2, 3)


MEMORY = np.zeros(8192, np.uint8)
BASE = int(MEMORY.ctypes.data)
A, B = Region(BASE + 1000, 100), Region(BASE + 2000, 100)


def pieces_here(offset: list[int], nbytes: list[int]) -> Descriptors:
    return pieces([BASE + each for each in offset], nbytes)


def test_pinned_memory_stays() -> None:
    memory = LocalMemory()
    memory.add([A, B])
    first = memory.pin(pieces_here([1000, 1050], [10, 50]))
    second = memory.pin(pieces_here([1000, 2000], [10, 100]))
    assert first == {A}
    assert second == {A, B}
    memory.unpin(first)
    with pytest.raises(MemoryBusyError):
        memory.remove([A])
    memory.unpin(second)
    assert memory.busy == ()
    memory.remove([A, B])
    assert memory.regions == ()


def test_a_refused_change_changes_nothing() -> None:
    memory = LocalMemory()
    memory.add([A, B])
    pinned = memory.pin(pieces_here([2000], [1]))
    with pytest.raises(MemoryBusyError):
        memory.remove([A, B])
    with pytest.raises(OutOfBoundsError):
        memory.remove([A, Region(BASE + 1000, 99)])
    with pytest.raises(OutOfBoundsError):
        memory.add([Region(BASE + 5000, 1), Region(BASE + 2099, 2)])
    with pytest.raises(OutOfBoundsError):
        memory.pin(pieces_here([1000, 3000], [1, 1]))
    assert memory.regions == (A, B)
    assert memory.busy == (B,)
    memory.unpin(pinned)


def test_pins_of_many_threads_add_up() -> None:
    memory = LocalMemory()
    memory.add([A, B])

    def use() -> None:
        for _ in range(200):
            memory.unpin(memory.pin(pieces_here([1000, 2000], [1, 1])))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert memory.busy == ()


# ------------------------------------------------------------------- what exists of it

PAGE = mmap.PAGESIZE
NONE, READ, READ_WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE


@pytest.fixture
def pages() -> Iterator[Callable[..., int]]:
    """Map pages with the protections that are given, and return where."""
    made = []

    def make(*protections: int) -> int:
        whole = mmap.mmap(-1, len(protections) * PAGE)
        view = ctypes.c_char.from_buffer(whole)
        made.append((whole, view))
        address = ctypes.addressof(view)
        libc = ctypes.CDLL(None, use_errno=True)
        for i, protection in enumerate(protections):
            assert not libc.mprotect(ctypes.c_void_p(address + i * PAGE), PAGE, protection)
        return address

    yield make
    while made:
        whole, view = made.pop()
        del view
        whole.close()


def test_memory_that_is_not_there_is_not_registered(pages: Callable[..., int]) -> None:
    start = pages(READ_WRITE, NONE, READ_WRITE, READ)
    memory = LocalMemory()
    bad = {
        Region(start, PAGE + 1): start + PAGE,
        Region(start, 3 * PAGE): start + PAGE,
        Region(start + PAGE, 1): start + PAGE,
        Region(start + 2 * PAGE - 1, 2): start + 2 * PAGE - 1,
        Region(8, 8): 8,
        Region((1 << 64) - 16, 16): (1 << 64) - 16,
    }
    for region, hole in bad.items():
        for listed in ([region], [Region(BASE, 8), region], [region, Region(BASE, 8)]):
            with pytest.raises(TransportError, match=f"is at {hole:#x}; allocate it"):
                memory.add(listed)
            assert memory.regions == ()
    good = [Region(start, PAGE), Region(start + 2 * PAGE, 2 * PAGE), Region(BASE, 8192)]
    memory.add(good)
    assert set(memory.regions) == set(good)


def test_other_kinds_of_memory_are_the_business_of_their_drivers() -> None:
    memory = LocalMemory()
    memory.add([Region(8, 8, "cuda")])
    assert len(memory.regions) == 1


def test_where_the_kernel_tells_nothing_all_is_taken_to_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mappings, "_MAPS", tmp_path / "maps")
    memory = LocalMemory()
    memory.add([Region(8, 8)])
    assert memory.pin(pieces([8], [8]), changes=True) == set(memory.regions)


def test_nothing_is_read_into_what_can_only_be_read(pages: Callable[..., int]) -> None:
    start = pages(READ_WRITE, READ, READ_WRITE)
    memory = LocalMemory()
    half, good = Region(start, 2 * PAGE), Region(start + 2 * PAGE, PAGE)
    memory.add([half, good])
    with pytest.raises(TransportError, match=f"cannot read into region {start:#x}"):
        memory.pin(pieces([good.address, half.end - 8], [8, 8]), changes=True)
    assert memory.busy == ()
    memory.unpin(memory.pin(pieces([half.address], [8])))
    memory.unpin(memory.pin(pieces([good.address], [8]), changes=True))
    memory.remove([half])
    whole = Region(start, PAGE)
    memory.add([whole])
    assert memory.pin(pieces([start], [8]), changes=True) == {whole}
