"""What engines say to each other: over the side channel, and in notes from rank to rank."""

from typing import Annotated

import msgspec

from kvbridge.errors import HandshakeError, IncompatibleError
from kvbridge.handshake.compatibility import difference
from kvbridge.handshake.digests import DigestRequest, Digests
from kvbridge.handshake.metadata import Fact, HandshakeMetadata
from kvbridge.handshake.reader_note import ReaderNote
from kvbridge.handshake.wire import (
    FACTORS_MAX_BYTES,
    REQUEST_MAX_BYTES,
    WIRE,
    common_version,
    decode,
    encode,
)
from kvbridge.model import Rank

NOTE_MAX_BYTES = 64 << 10
RENEWALS_MAX = 1024
"""So many requests may be renewed at once; their names have to fit into one message too."""


class Greeting(msgspec.Struct, frozen=True):
    """The part of a request that every version has."""

    wire: tuple[int, int]


class MetadataRequest(msgspec.Struct, frozen=True, tag="metadata?"):
    """Asks an engine for the metadata of its ranks.

    Attributes:
        wire: Version that the asker speaks.
        engine_id: Engine that the asker expects behind the address, or None for whichever.
        ranks: Ranks that it wants; None for all.
        asker: Id of the asking engine, for the log of the one that is asked.
        factors: What the asker must agree upon, so that both sides learn of a difference.
    """

    wire: tuple[int, int] = WIRE
    engine_id: str | None = None
    ranks: tuple[Rank, ...] | None = None
    asker: str = ""
    factors: dict[str, Fact] | None = None


class RenewalRequest(msgspec.Struct, frozen=True, tag="renew?"):
    """Asks an engine to keep blocks for longer, since their readers still have to wait.

    Attributes:
        wire: Version that the asker speaks.
        engine_id: Engine that keeps them.
        incarnation: Which start of it; empty for requests whose names were chosen beforehand, and
            are used once, so that it does not matter.
        requests: The requests, by that engine's names for them.
        asker: Id of the asking engine.
    """

    engine_id: str
    incarnation: str
    requests: Annotated[tuple[str, ...], msgspec.Meta(max_length=RENEWALS_MAX)]
    wire: tuple[int, int] = WIRE
    asker: str = ""


class MetadataReply(msgspec.Struct, frozen=True, tag="metadata"):
    """Answers with ranks.

    Attributes:
        generation: Rises whenever the engine publishes anew.
        ranks: Metadata of every rank that was asked for.
        wire: Version that both sides speak.
    """

    generation: int
    ranks: tuple[HandshakeMetadata, ...]
    wire: tuple[int, int] = (1, 0)

    @property
    def by_rank(self) -> dict[Rank, HandshakeMetadata]:
        """The metadata of each rank, by its coordinate."""
        return {data.rank: data for data in self.ranks}


class RenewalReply(msgspec.Struct, frozen=True, tag="renewed"):
    """Answers which requests are kept.

    Attributes:
        kept: For each request that was named, whether its blocks are kept.
        lease_s: How long from now on, at least.
        wire: Version that both sides speak.
    """

    kept: tuple[bool, ...]
    lease_s: float
    wire: tuple[int, int] = WIRE


_NOTHING = msgspec.Raw(encode({}))


class RefusalReply(msgspec.Struct, frozen=True, tag="refusal"):
    """Answers that the request cannot be served.

    Attributes:
        reason: Why, in words.
        not_yet: Whether the same request may be served a little later.
        differences: For each fact that must be equal and is not, its value on the side that was
            asked, and on the side that asked; not decoded yet.
    """

    reason: str
    not_yet: bool = False
    differences: msgspec.Raw = _NOTHING


Request = MetadataRequest | RenewalRequest
Reply = MetadataReply | RenewalReply | RefusalReply


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Tells a producer rank that one reader needs a request's blocks no more.

    Attributes:
        request_id: The request, by the producer's name for it.
        engine_id: The reader's engine.
        incarnation: That engine's incarnation.
        rank: The reader.
        readers: How many distinct readers of that engine will report to this producer rank.
        ok: Whether the reader has what it needs.
    """

    request_id: str
    engine_id: str
    incarnation: str
    rank: Rank
    readers: int
    ok: bool = True


class Blocks(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a request in one cache group; as text of four bytes each, to be small.

    Attributes:
        ids: Little-endian block ids.
        start_token: First token that they hold.
        null_block_id: Id of an entry without a block.
    """

    ids: bytes
    start_token: int = 0
    null_block_id: int | None = None


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A part of what is wanted, to be written as one piece; the reader puts it in its place.

    What is wanted is one stream of bytes, in the order of the addresses where they belong, see
    :class:`~kvbridge.plan.PackedStream`.

    Attributes:
        start: Where the part begins in the stream.
        stop: Where it ends.
        address: Where the reader wants it: in the staging memory that it has published.
        digest: That of the stream as the reader understands it.
    """

    start: int
    stop: int
    address: int
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop - self.start


class Want(ReaderNote, frozen=True, kw_only=True, tag="want"):
    """Asks a producer rank to write a request's blocks into those of a reader, once they are ready.

    Each is carried out once at most. With an empty range of tokens it asks only whether that rank
    can reach the reader.

    Attributes:
        blocks: Where the tokens go, for each cache group.
        start_token: First token to write.
        end_token: One past the last one.
        timeout_s: For how long the reader waits, from when this is heard.
        packed: The part of it that is meant, and where that goes instead; None for all of it, each
            cell to its place.
        tokens_digest: What tells the request's tokens up to the last one from others; empty where
            the reader does not compare them.
    """

    blocks: tuple[Blocks, ...]
    start_token: int
    end_token: int
    timeout_s: float
    packed: Packed | None = None
    tokens_digest: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be written."""
        return self.start_token == self.end_token


class Withdrawal(msgspec.Struct, frozen=True, tag="withdrawal"):
    """Asks a producer rank to write no more for a :class:`Want`, and to say when it does not.

    Attributes:
        number: That of the want.
        request_id: That of the want.
    """

    number: int
    request_id: str


class Given(msgspec.Struct, frozen=True, tag="given"):
    """Tells a reader that a producer rank has written what it wanted, or that it will not come.

    Either way, that rank touches the reader's blocks no more.

    Attributes:
        number: That of the want.
        nbytes: Bytes that were written.
        reason: Why it will not come; empty if it has.
        cause: The same in a word.
    """

    number: int
    nbytes: int = 0
    reason: str = ""
    cause: str = ""


Note = Release | Want | Withdrawal | Given | DigestRequest | Digests
"""What ranks tell each other through their transport."""


def decode_request(data: bytes) -> Request:
    """Decode what a peer asks.

    Raises:
        HandshakeError: It is no request, or of another major version.
    """
    try:
        request: Request = decode(data, Request, "request", limit=REQUEST_MAX_BYTES)  # type: ignore[arg-type]
    except HandshakeError as error:
        # Perhaps a request of another major version: then say so, rather than that it is none.
        try:
            greeting = decode(data, Greeting, "request", limit=REQUEST_MAX_BYTES)
        except HandshakeError:
            raise error from None
        common_version(greeting.wire)
        raise
    common_version(request.wire)
    return request


def decode_reply(data: bytes) -> MetadataReply | RenewalReply | None:
    """Decode a peer's answer; None means that it has nothing to say yet.

    Raises:
        IncompatibleError: The peer found that the engines differ.
        HandshakeError: It is no answer, or the peer refused; the message says why.
    """
    reply: Reply = decode(data, Reply, "reply")  # type: ignore[arg-type]
    if not isinstance(reply, RefusalReply):
        common_version(reply.wire)
        if isinstance(reply, MetadataReply) and not reply.ranks:
            raise HandshakeError("the peer answered with no ranks at all")
        return reply
    if reply.not_yet:
        return None
    differences = decode(
        bytes(reply.differences),
        dict[str, tuple[Fact, Fact]],
        "list of differences",
        limit=2 * FACTORS_MAX_BYTES,
    )
    if differences:
        # The peer says "here" of its own side; whoever reads this is on the other one.
        ours = {field: (here, there) for field, (there, here) in differences.items()}
        listed = "; ".join(str(difference(field, *ours[field])) for field in ours)
        raise IncompatibleError(f"the peer refused, the engines are incompatible: {listed}", ours)
    raise HandshakeError(f"the peer refused: {reply.reason}")


def decode_note(data: bytes) -> Note:
    """Decode what a rank of another engine tells this one.

    Raises:
        HandshakeError: It is nothing that ranks tell each other, or cannot be.
    """
    note: Note = decode(data, Note, "note", limit=NOTE_MAX_BYTES)  # type: ignore[arg-type]
    if isinstance(note, Release) and note.readers < 1:
        raise HandshakeError(f"release of {note.request_id!r} expects {note.readers} readers")
    if isinstance(note, Want):
        if not (0 <= note.start_token <= note.end_token and 0 <= note.timeout_s <= 86_400):
            raise HandshakeError(
                f"tokens [{note.start_token}, {note.end_token}) of {note.request_id!r} are wanted "
                f"within {note.timeout_s} s, which is impossible"
            )
        part = note.packed
        if part is not None and not (0 <= part.start < part.stop and 0 < part.address < 1 << 63):
            raise HandshakeError(
                f"bytes [{part.start}, {part.stop}) of {note.request_id!r} are wanted at "
                f"{part.address:#x}, which is impossible"
            )
        if any(len(each.ids) % 4 for each in note.blocks):
            raise HandshakeError(f"block ids of {note.request_id!r} of other than four bytes")
    return note
