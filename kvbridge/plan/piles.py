"""Scattered cells of one source, as they are staged: piles of pages, and shares of a pile."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbridge.plan.binding import RankBinding, Stream
from kvbridge.plan.lower import Part, extend
from kvbridge.plan.pieces import Pieces
from kvbridge.plan.segments import Segments
from kvbridge.plan.values import Int64Array


class Spans(NamedTuple):
    """The parts of a remote page that some regions lie in; those that touch are one.

    Shape: start, nbytes [K] int64: where the parts of page 0 start, and their lengths.
    """

    start: Int64Array
    nbytes: Int64Array

    @classmethod
    def of(cls, streams: list[Stream], seams: Int64Array) -> "Spans":
        """Return those of all regions of some streams."""
        first = np.concatenate([stream.remote_base for stream in streams])
        end = np.concatenate([stream.remote_base + _span(stream) for stream in streams])
        order = np.argsort(first, kind="stable")
        first, reach = first[order], np.maximum.accumulate(end[order])
        gap = first[1:] - reach[:-1]
        apart = (gap > 0) | ((gap == 0) & np.isin(first[1:], seams))
        opens = np.flatnonzero(np.concatenate(([True], apart)))
        start: Int64Array = first[opens]
        return cls(start, np.append(reach[opens[1:] - 1], reach[-1]) - start)

    def cut(self, aim_nbytes: int) -> Iterator["Spans"]:
        """Yield as many together as are wanted; one that is larger is alone."""
        ends, first = np.cumsum(self.nbytes), 0
        while first < ends.size:
            most = int(ends[first] - self.nbytes[first]) + aim_nbytes
            last = max(first + 1, int(np.searchsorted(ends, most, side="right")))
            yield Spans(self.start[first:last], self.nbytes[first:last])
            first = last

    def part_of(self, stream: Stream) -> list[Stream]:
        """Return what of a stream lies in these spans, if any."""
        base = stream.remote_base
        inside = (base >= self.start[0]) & (base < self.start[-1] + self.nbytes[-1])
        if not inside.any():
            return []
        return [Stream(stream.pattern, stream.local_base[inside], base[inside])]

    def as_remote(self, stream: Stream, slots: Int64Array) -> list[Stream]:
        """Return a stream that takes its cells from staging instead of the remote memory."""
        part: NDArray[np.intp] = np.searchsorted(self.start, stream.remote_base, side="right") - 1
        base = slots[part] + stream.remote_base - self.start[part]
        streams = []
        for nbytes in np.unique(self.nbytes[part]):
            same = self.nbytes[part] == nbytes
            remote = replace(stream.pattern.remote, page_stride=int(nbytes))
            pattern = replace(stream.pattern, remote=remote)
            streams.append(Stream(pattern, stream.local_base[same], base[same]))
        return streams


class Pile:
    """Scattered cells of one source whose pages are as far apart."""

    def __init__(
        self,
        rank: RankBinding,
        streams: list[Stream],
        spans: Spans,
        pages: Int64Array,
        segments: Segments,
    ) -> None:
        """Take what it is made of.

        Args:
            rank: The source.
            streams: The cells.
            spans: The parts of a page that they lie in.
            pages: The remote pages that are needed.
            segments: What of them goes where; a remote page is its place in ``pages``.
        """
        self.rank, self.streams, self.spans = rank, streams, spans
        self.pages, self.segments = pages, segments
        self.page_stride = streams[0].pattern.remote.page_stride
        self.page_nbytes = int(spans.nbytes.sum())


class Share(NamedTuple):
    """Some pages of a pile, by their places in it."""

    pile: Pile
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Bytes of staging memory that it takes."""
        return (self.last - self.first) * self.pile.page_nbytes

    def reads(self, address: int) -> Pieces:
        """Return what to read from an address of staging memory on."""
        spans, pages = self.pile.spans, self.pile.pages[self.first : self.last]
        slot_of_page = self._slots(address)[:, None] + spans.nbytes[:, None] * np.arange(pages.size)
        return (
            slot_of_page.ravel(),
            (spans.start[:, None] + pages * self.pile.page_stride).ravel(),
            np.repeat(spans.nbytes, pages.size),
        )

    def scatter(self, address: int) -> list[Pieces]:
        """Return where in the cache all of that belongs."""
        index = self.pile.segments.remote_page
        staged = self.pile.segments.select((index >= self.first) & (index < self.last))
        staged = replace(staged, remote_page=staged.remote_page - self.first)
        parts: list[Part] = []
        slots = self._slots(address)
        for stream in self.pile.streams:
            for part in self.pile.spans.as_remote(stream, slots):
                extend(parts, part, staged)
        return [part.pieces() for part in parts if part.runs[0].size]

    def _slots(self, address: int) -> Int64Array:
        """Return where the first page of each span lies: the pages of a span follow each other."""
        nbytes = self.pile.spans.nbytes * (self.last - self.first)
        slots: Int64Array = address + np.cumsum(nbytes) - nbytes
        return slots


def _span(stream: Stream) -> int:
    """Return the bytes of a remote page from a region's first cell to the end of its last."""
    grid = stream.pattern.remote
    return (
        (stream.pattern.units - 1) * grid.unit_stride
        + (grid.cells - 1) * grid.token_stride
        + stream.pattern.cell_bytes
    )
