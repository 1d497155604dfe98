"""The demo's parent never waits for ever for a rank, not even in midst of a message."""

import multiprocessing
import os

import pytest

from kvbridge.demo.cluster import _bound_waits


def test_a_message_that_stops_midway_is_given_up() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    _bound_waits(ours, 0.2)
    os.write(theirs.fileno(), b"\x00\x00\x10")
    assert ours.poll(5)
    with pytest.raises(BlockingIOError):
        ours.recv()
    ours.close()
    theirs.close()


def test_a_message_that_nobody_takes_is_given_up() -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    _bound_waits(ours, 0.2)
    with pytest.raises(BlockingIOError):
        ours.send(b"x" * (64 << 20))
    ours.close()
    theirs.close()
