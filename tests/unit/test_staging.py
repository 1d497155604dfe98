"""The pool of staging memory: reservations are whole, apart from each other, and come back."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import TransportError
from kvbridge.model import Region
from kvbridge.session.staging import Staging

NBYTES = 1000


class Memory:
    """What of a transport a pool needs."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.refuses = False

    def register(self, regions: list[Region]) -> None:
        if self.refuses:
            raise TransportError("no memory can be pinned any more")
        self.regions += regions


def pool(nbytes: int = NBYTES, kind: str = "dram") -> tuple[Staging, Memory]:
    memory = Memory()
    local: Any = SimpleNamespace(memory=(kind, 0), cache=SimpleNamespace(regions=()))
    transport: Any = memory
    return Staging(transport, local, nbytes), memory


@given(
    steps=st.lists(st.one_of(st.integers(1, NBYTES), st.just(0)), max_size=40),
    chosen=st.randoms(use_true_random=False),
)
def test_reservations_are_whole_and_apart_and_an_empty_pool_fits_any(
    steps: list[int], chosen: Any
) -> None:
    """A step reserves so many bytes; or, as 0, gives one reservation back."""
    staging, memory = pool()
    assert staging.open()
    (region,) = memory.regions
    held: dict[int, int] = {}
    for nbytes in steps:
        if not nbytes:
            if held:
                address = chosen.choice(sorted(held))
                staging.release(address)
                del held[address]
        else:
            got = staging.reserve(nbytes)
            if got is None:
                assert held, "all of it is free"
                continue
            assert region.address <= got
            assert got + nbytes <= region.end
            assert all(got + nbytes <= at or at + held[at] <= got for at in held)
            held[got] = nbytes
        assert staging.used_nbytes == sum(held.values())


def test_what_is_given_back_is_used_again() -> None:
    staging, _ = pool()
    staging.open()
    first, second = staging.reserve(500), staging.reserve(400)
    assert first is not None
    assert second is not None
    assert staging.reserve(200) is None
    staging.release(first)
    assert staging.reserve(500) == first
    assert staging.reserve(64) is None


def test_it_is_made_once_and_registered_as_the_cache_is() -> None:
    staging, memory = pool()
    assert staging.regions == ()
    assert staging.reserve(1) is None
    assert (staging.open(), staging.open()) == (True, True)
    assert staging.regions == tuple(memory.regions)
    assert (memory.regions[0].nbytes, memory.regions[0].memory_kind) == (NBYTES, "dram")
    staging.reserve(10)
    staging.forget()
    assert (staging.regions, staging.used_nbytes) == ((), 0)
    assert staging.open()
    assert len(memory.regions) == 2


@pytest.mark.parametrize(("nbytes", "kind"), [(0, "dram"), (NBYTES, "cuda")])
def test_there_is_none_without_bytes_or_where_the_host_cannot_arrange(
    nbytes: int, kind: str
) -> None:
    staging, memory = pool(nbytes, kind)
    assert not staging.is_possible
    assert not staging.open()
    assert not memory.regions


def test_what_cannot_be_registered_is_tried_again_with_the_next_cache() -> None:
    staging, memory = pool()
    memory.refuses = True
    assert not staging.open()
    assert not staging.is_possible
    memory.refuses = False
    opened = [staging.open()]
    staging.forget()
    opened.append(staging.open())
    assert opened == [False, True]
