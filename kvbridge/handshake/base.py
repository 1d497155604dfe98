"""Handing the metadata of an engine's ranks to whoever serves it, pipeline stages included."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from kvbridge.errors import HandshakeError
from kvbridge.handshake.metadata import HandshakeMetadata
from kvbridge.model import Rank


class PPAwareHandshake(ABC):
    """Base of everything that an engine hands its ranks' metadata to.

    An engine calls exactly one of the two setters: the PP-aware one when any stage is above 0.
    Either may be called again, when the engine has registered its memory anew.
    """

    @abstractmethod
    def set_xfer_handshake_metadata(self, metadata: Mapping[int, HandshakeMetadata]) -> None:
        """Take the metadata of an engine of one stage, by tensor-parallel rank."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Rank, HandshakeMetadata]
    ) -> None:
        """Take the metadata of every rank, by ``(pp_rank, tp_rank)``.

        The base class knows one stage only; a class that can serve several overrides this.

        Raises:
            ValueError: A stage above 0 is given to a class that does not override this.
        """
        beyond = sorted(rank for rank in metadata if rank[0] > 0)
        if beyond:
            raise ValueError(
                f"{type(self).__name__} serves one pipeline stage, but got metadata of ranks "
                f"{beyond[:4]}; override set_xfer_handshake_metadata_pp_aware, or run with "
                "pipeline_parallel_size=1"
            )
        self.set_xfer_handshake_metadata({tp_rank: data for (_, tp_rank), data in metadata.items()})


def hand_over(handshake: PPAwareHandshake, metadata: Mapping[Rank, HandshakeMetadata]) -> None:
    """Give an engine's gathered metadata to whoever serves it, by the setter that fits.

    Raises:
        ValueError: There are several stages, and the class serves one.
    """
    if any(pp_rank > 0 for pp_rank, _ in metadata):
        handshake.set_xfer_handshake_metadata_pp_aware(metadata)
    else:
        handshake.set_xfer_handshake_metadata({tp: data for (_, tp), data in metadata.items()})


def gather_handshake_metadata(
    results: Iterable[Mapping[Rank, HandshakeMetadata] | None],
    *,
    pp_size: int | None = None,
    tp_size: int | None = None,
) -> dict[Rank, HandshakeMetadata]:
    """Merge what the workers of one engine return.

    Args:
        results: One mapping for each worker, or None from a worker that has nothing to say.
        pp_size: Stages that must be there, if known.
        tp_size: Ranks of each stage that must be there, if known.

    Raises:
        HandshakeError: Two workers contradict each other, a rank is missing, or the ranks carry
            several engine ids or incarnations.
    """
    merged: dict[Rank, HandshakeMetadata] = {}
    for result in results:
        for rank, metadata in (result or {}).items():
            if merged.setdefault(rank, metadata) != metadata:
                raise HandshakeError(
                    f"two workers announce rank {rank} with different metadata; "
                    "each rank must be announced by one worker"
                )
            if metadata.rank != rank:
                raise HandshakeError(f"metadata of rank {metadata.rank} is listed under {rank}")
    _check_same("engine id", {data.engine_id: rank for rank, data in merged.items()})
    _check_same("incarnation", {data.incarnation: rank for rank, data in merged.items()})
    stages = range(pp_size if pp_size is not None else 0)
    ranks = range(tp_size if tp_size is not None else 0)
    found_stages = {pp for pp, _ in merged}
    found_ranks = {tp for _, tp in merged}
    missing = [(p, t) for p in (stages or found_stages) for t in (ranks or found_ranks)
               if (p, t) not in merged]  # fmt: skip
    if missing:
        raise HandshakeError(
            f"ranks {sorted(missing)} of (pp {pp_size}, tp {tp_size}) sent no metadata; "
            f"{len(merged)} ranks did"
        )
    return merged


def _check_same(what: str, values: Mapping[str, Rank]) -> None:
    if len(values) > 1:
        raise HandshakeError(
            f"the ranks of one engine carry several {what}s: "
            f"{', '.join(f'{value!r} (rank {rank})' for value, rank in values.items())}; "
            "agree on the one of rank 0"
        )
