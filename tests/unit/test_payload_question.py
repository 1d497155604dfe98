"""What a reader asks of the rank that gave it a request's cells, and how answers are sent."""

from typing import Any

import msgspec
import numpy as np
import pytest

from kvbridge.errors import ConfigError, HandshakeError, PlanError
from kvbridge.handshake import DigestRequest, Digests
from kvbridge.handshake.messages import decode_note
from kvbridge.handshake.wire import encode
from kvbridge.plan import CellRange, Probe, TokenShare
from kvbridge.session import questions
from kvbridge.session.digesting import packed, unpacked
from kvbridge.session.questions import PayloadCheck, question
from tests.unit.held_values import LAYERS, TOKENS, Held, edges

ASKS = DigestRequest(7, "r#1", "decode", "i", 1, (0, 0), ("127.0.0.1", 5), epoch=99)


def asked(mode: Any, most_nbytes: int, epoch: int = 99) -> tuple[DigestRequest, int]:
    """Return a question, and how many digests answer it."""
    ((_, consumer, regions),) = edges([Held()], [Held(page=16)])
    whole = msgspec.structs.replace(ASKS, epoch=epoch)
    check = PayloadCheck(mode, [consumer.table], 0, TOKENS, whole)
    note, probes = question(consumer.cache, regions, check, whole, most_nbytes)
    asks = decode_note(note)
    assert isinstance(asks, DigestRequest)
    assert asks.probes == probes
    assert max(len(note), questions.ANSWER_NBYTES + 8 * total(probes)) <= most_nbytes
    return asks, total(probes)


def total(probes: tuple[Probe, ...]) -> int:
    return sum(len(each.chunks) for each in probes)


def test_all_of_it_is_asked_for_in_chunks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of two layers, 32 tokens."""
    monkeypatch.setattr(questions, "CHUNK_TOKENS", 1)
    ranges = 2 * LAYERS
    sizes = [asked("full", most)[1] // ranges for most in (1 << 16, 900, 800, 700, 600)]
    assert sizes[0] == TOKENS
    assert sizes == sorted(sizes, reverse=True)
    assert {TOKENS // size for size in sizes} <= {1, 2, 4, 8, 16, 32}
    assert sizes[-1] < TOKENS
    asks, _ = asked("full", 600)
    assert all(each.chunks[0][0] == 0 and each.chunks[-1][1] == TOKENS for each in asks.probes)


def test_what_cannot_be_asked_for_at_all_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"4 ranges of cells takes notifications of .* takes 300;"
    ):
        asked("full", 300)
    with pytest.raises(ConfigError, match="set payload_check to 'off'"):
        asked("sampled", 300)


def test_samples_are_so_many_and_others_for_another_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "CHUNK_TOKENS", 1)
    one, count = asked("sampled", 1 << 16)
    assert count == questions.SAMPLES
    assert one == asked("sampled", 1 << 16)[0]
    assert one.probes != asked("sampled", 1 << 16, epoch=100)[0].probes


def cells(first: int, last: int, component: str = "k") -> CellRange:
    return CellRange(0, "layers.0", component, first, last, 16, (TokenShare(1, 2, 4),))


def test_a_question_that_asks_twice_for_something_is_none() -> None:
    fine = (Probe(cells(0, 2), ((0, 4), (4, 8))), Probe(cells(2, 4), ((0, 4),)),
            Probe(cells(0, 4, "v"), ((0, 4),)))  # fmt: skip
    note = encode(msgspec.structs.replace(ASKS, probes=fine))
    assert decode_note(note) == msgspec.structs.replace(ASKS, probes=fine)
    plain = msgspec.msgpack.decode(note)
    for twice in (
        plain["probes"][0],
        {**plain["probes"][0], "cells": msgspec.to_builtins(cells(1, 3))},
    ):
        with pytest.raises(HandshakeError, match="is asked for twice"):
            decode_note(encode({**plain, "probes": [*plain["probes"], twice]}))


def test_digests_come_back_as_they_were_sent() -> None:
    values = (np.array([1, 1 << 63], np.uint64), np.array([], np.uint64), np.array([5], np.uint64))
    answer = decode_note(encode(Digests(7, packed(values))))
    assert isinstance(answer, Digests)
    back = unpacked(answer.values, [2, 0, 1])
    assert [each.tolist() for each in back] == [each.tolist() for each in values]
    with pytest.raises(PlanError, match="4 digests were asked for, 24 bytes came"):
        unpacked(answer.values, [2, 1, 1])
