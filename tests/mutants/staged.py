"""Bugs of loads that are staged, and of what is packed for them."""

from typing import Any

import pytest

from kvbridge.session.gifts import Gift
from kvbridge.session.packing import PackedPart, Packing
from kvbridge.session.portions import Portions
from kvbridge.session.transfer import Transfer
from kvbridge.transport import Handle
from tests.mutants.bugs import bug


@bug("its own bytes")
def gives_staging_back_before_its_read_is_quiet(patch: pytest.MonkeyPatch) -> None:
    """What was given up lands in what is by then another request's."""

    def give_up(self: Portions, transfer: Transfer) -> str:
        words = sound(self, transfer)
        for begun in [each for each in self._begun if each.transfer is transfer]:
            if begun.arranging is None:
                self._end(begun)
        return words

    sound = Portions.give_up
    patch.setattr(Portions, "give_up", give_up)


@bug("its own bytes", "can touch it")
def calls_a_load_quiet_that_is_being_arranged(patch: pytest.MonkeyPatch) -> None:
    def poll(self: Portions) -> None:
        sound(self)
        for begun in self._begun:
            if begun.arranging is not None:
                begun.transfer.pending.discard(begun)

    sound = Portions.poll
    patch.setattr(Portions, "poll", poll)


@bug("its own bytes")
def arranges_what_is_not_all_here(patch: pytest.MonkeyPatch) -> None:
    """A portion of several reads, after the first of them."""

    def is_here(self: object) -> bool:
        awaited, pending = self.awaited, self.transfer.pending  # type: ignore[attr-defined]
        return bool(awaited - pending) or not awaited

    patch.setattr("kvbridge.session.portions._Begun.is_here", property(is_here))


# --- what is packed -------------------------------------------------------------------------------


@bug("its own bytes", "wanted, once")
def gives_staging_back_before_its_write_is_answered(patch: pytest.MonkeyPatch) -> None:
    """Whoever was asked may still write what nobody waits for any more."""

    def poll(self: Portions) -> None:
        sound(self)
        for begun in list(self._begun):
            is_packed = isinstance(begun.portion, PackedPart) and begun.arranging is None
            if is_packed and begun.transfer.reason:
                self._end(begun)

    sound = Portions.poll
    patch.setattr(Portions, "poll", poll)


@bug("its own bytes")
def packs_into_what_is_still_being_written(patch: pytest.MonkeyPatch) -> None:
    """Its memory is given back as soon as the write has begun."""

    def write(self: Packing, job: Any, *rest: Any) -> None:
        sound(self, job, *rest)
        if job.handle is not None:
            del self._jobs[job.gift]
            self._staging.release(job.address)

    sound = Packing._write
    patch.setattr(Packing, "_write", write)


@bug("but what was wanted")
def writes_what_was_withdrawn_while_it_was_packed(patch: pytest.MonkeyPatch) -> None:
    def begin(self: Packing, gift: Any, session: Any, want: Any, part: Any, ready: Any) -> None:
        sound(self, gift, session, want, part, ready)
        whither[gift] = (session, want.rank, part)

    def poll(self: Packing) -> None:
        for gift, job in self._jobs.items():
            if gift.reason and job.handle is None and job.packing.done():
                self._write(job, *whither[gift])
        end(self)

    whither: dict[Any, tuple[Any, Any, Any]] = {}
    sound, end = Packing._begin, Packing.poll
    patch.setattr(Packing, "_begin", begin)
    patch.setattr(Packing, "poll", poll)


@bug("can touch it", "its own bytes")
def frees_what_it_is_packing(patch: pytest.MonkeyPatch) -> None:
    """As if only writes read blocks."""

    def reads_blocks(self: Gift) -> bool:
        return sound.fget(self) and any(isinstance(each, Handle) for each in self.pending)

    sound: Any = Gift.reads_blocks
    patch.setattr(Gift, "reads_blocks", property(reads_blocks))
