"""Bugs of loads that are staged."""

import pytest

from kvbridge.session.portions import Portions
from kvbridge.session.transfer import Transfer
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
