"""The staged form of a read: whole pages into staging memory, then one rearrangement here.

Staging is laid out like the remote pages that hold scattered cells, without the pages that are not
needed. So the rearrangement is the same lowering as ever, with the staging in the place of the
remote memory. Cells that are large pieces anyway go straight into the cache.

A request may need more staging than there is, so it can be cut into *portions*. They are cut
between remote pages, and not at tokens: windows are counted from the last token of the request, a
state belongs to no token, and some pages move whole, so ranges of a request that are lowered by
themselves do not add up to it. Its segments are found once, each page is in one portion, and the
rearrangement of a portion, by far the longest of its lists, is only made when it is asked for.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvbridge.plan.binding import Binding, RankBinding, Stream
from kvbridge.plan.lower import SegmentsOf, batch_of, merged, pieces_of, segments_for
from kvbridge.plan.pieces import Pieces
from kvbridge.plan.piles import Pile, Share, Spans
from kvbridge.plan.rearrange import Rearrangement
from kvbridge.plan.values import BlockTable, TransferBatch

NO_SEAMS = np.empty(0, np.int64)
NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class StagedTransfer:
    """One request in the staged form.

    Attributes:
        batches: What to read, into staging memory and straight into the cache.
        scatter: What to put where once all of that has arrived.
        staging_nbytes: Bytes of staging memory that it takes.
    """

    batches: list[TransferBatch]
    scatter: Rearrangement
    staging_nbytes: int


class _Source(NamedTuple):
    """What of one source is in a portion.

    Attributes:
        rank: The source.
        shares: What is staged.
        direct: What goes straight into the cache.
        piece_count: How many pieces that is before merging.
    """

    rank: RankBinding
    shares: tuple[Share, ...]
    direct: Pieces = (NO_SEAMS, NO_SEAMS, NO_SEAMS)
    piece_count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StagedPortion:
    """A part of a request that is read, and then rearranged, by itself.

    Attributes:
        sources: What of it comes from where.
        staging_nbytes: Bytes of staging memory that it takes; 0 if all of it goes straight into the
            cache.
    """

    sources: tuple[_Source, ...]

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory that it takes."""
        return sum(share.nbytes for source in self.sources for share in source.shares)

    def batches(self, staging_address: int) -> list[TransferBatch]:
        """Return what to read, into staging memory from an address on, and into the cache."""
        batches: list[TransferBatch] = []
        for source, shares in self._placed(staging_address):
            reads = [share.reads(address) for share, address in shares]
            count = source.piece_count + sum(pieces[0].size for pieces in reads)
            pieces = merged([source.direct, *reads], source.rank.seams)
            batches += [batch_of(source.rank, pieces, count)] if pieces[0].size else []
        return batches

    def scatter(self, staging_address: int) -> Rearrangement:
        """Return what to put where once all of it has arrived there; from any thread."""
        scattered = [
            merged(
                [pieces for share, address in shares for pieces in share.scatter(address)],
                (source.rank.seams[0], NO_SEAMS),
            )
            for source, shares in self._placed(staging_address)
        ]
        if not scattered:
            return Rearrangement.nothing()
        cache, staging, nbytes = map(np.concatenate, zip(*scattered, strict=True))
        return Rearrangement(*(each.view(np.uint64) for each in (staging, cache, nbytes)))

    def _placed(self, address: int) -> Iterator[tuple[_Source, list[tuple[Share, int]]]]:
        """Yield the sources, and where in staging memory each of their shares begins."""
        for source in self.sources:
            shares = []
            for share in source.shares:
                shares.append((share, address))
                address += share.nbytes
            yield source, shares


def lower_staged_plan(
    binding: Binding,
    local_tables: Sequence[BlockTable],
    remote_tables: Sequence[BlockTable],
    tokens: tuple[int, int],
    staging_address: int,
) -> StagedTransfer:
    """Lower a plan for one request; see ``EngineTransferPlan.lower_staged``."""
    segments_of = segments_for(binding, local_tables, remote_tables, *tokens)
    whole = StagedPortion(
        tuple(_source(rank, segments_of, NO_LIMIT, NO_LIMIT) for rank in binding.ranks)
    )
    address = staging_address
    return StagedTransfer(whole.batches(address), whole.scatter(address), whole.staging_nbytes)


def staged_portions(
    binding: Binding,
    local_tables: Sequence[BlockTable],
    remote_tables: Sequence[BlockTable],
    tokens: tuple[int, int],
    most_nbytes: int,
    aim_nbytes: int,
) -> list[StagedPortion]:
    """Cut a request into portions; see ``EngineTransferPlan.staged_portions``."""
    segments_of = segments_for(binding, local_tables, remote_tables, *tokens)
    sources = [_source(rank, segments_of, most_nbytes, aim_nbytes) for rank in binding.ranks]
    direct = tuple(each._replace(shares=()) for each in sources if each.direct[0].size)
    portions = [StagedPortion(direct)] if direct else []
    for shares in _cut((share for each in sources for share in each.shares), aim_nbytes):
        by_rank = groupby(shares, key=lambda share: id(share.pile.rank))
        together = (tuple(of_one) for _, of_one in by_rank)
        portions.append(StagedPortion(tuple(_Source(each[0].pile.rank, each) for each in together)))
    return portions


def _cut(shares: Iterable[Share], aim_nbytes: int) -> Iterator[list[Share]]:
    """Put as many pages together as are wanted; a page that is larger is alone."""
    together: list[Share] = []
    room_nbytes = aim_nbytes
    for pile, start, last in shares:
        first = start
        while first < last:
            count = min(room_nbytes // pile.page_nbytes, last - first)
            if count < 1 and together:
                yield together
                together, room_nbytes = [], aim_nbytes
                continue
            together.append(Share(pile, first, first + max(count, 1)))
            first += max(count, 1)
            room_nbytes -= together[-1].nbytes
    if together:
        yield together


def _source(
    rank: RankBinding, segments_of: SegmentsOf, most_nbytes: int, aim_nbytes: int
) -> _Source:
    """Tell what of a source is staged from what is large, or is scattered over too large pages."""
    small = [stream for stream in rank.streams if _is_scattered(stream)]
    large = [stream for stream in rank.streams if not _is_scattered(stream)]
    alike: dict[tuple[object, ...], list[Stream]] = defaultdict(list)
    for stream in small:
        alike[stream.pattern.pagings, stream.pattern.remote.page_stride].append(stream)
    piles = []
    for members in alike.values():
        segments = segments_of(members[0].pattern)
        pages, index = np.unique(segments.remote_page, return_inverse=True)
        staged = replace(segments, remote_page=index.astype(np.int64))
        for spans in Spans.of(members, rank.seams[1]).cut(aim_nbytes):
            streams = [stream for each in members for stream in spans.part_of(each)]
            if int(spans.nbytes.sum()) > most_nbytes:
                large += streams
            elif pages.size:
                piles.append(Pile(rank, streams, spans, pages, staged))
    direct, count = pieces_of(large, rank.partial, rank.whole, rank, segments_of)
    return _Source(rank, tuple(Share(pile, 0, pile.pages.size) for pile in piles), direct, count)


def _is_scattered(stream: Stream) -> bool:
    return not stream.pattern.row_bytes and not stream.pattern.page_bytes
