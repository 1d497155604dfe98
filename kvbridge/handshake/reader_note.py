"""What all that a reader asks of a producer rank has in common."""

import msgspec

from kvbridge.model import Rank


class ReaderNote(msgspec.Struct, frozen=True):
    """Asks a producer rank for something of a request, and says who asks.

    Attributes:
        number: The reader's number for it.
        request_id: The request, by the producer's name for it.
        engine_id: The reader's engine.
        incarnation: That engine's incarnation.
        generation: Which registration of that engine's memory the reader is of.
        rank: The reader.
        address: Where that engine's handshake server listens, as host and port.
        epoch: That of the lease that the producer has given; None if the reader knows of none.
    """

    number: int
    request_id: str
    engine_id: str
    incarnation: str
    generation: int
    rank: Rank
    address: tuple[str, int]
    epoch: int | None = None
