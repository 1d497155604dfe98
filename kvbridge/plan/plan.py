"""The plan: what one rank exchanges with another engine, address-free, frozen and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kvbridge.errors import PlanError, UnboundPlanError, UnsupportedLayoutError
from kvbridge.model import CacheGroup, LayerKey, Rank, RankCache
from kvbridge.plan import document
from kvbridge.plan.binding import Binding, bind_plan
from kvbridge.plan.check import check_plan
from kvbridge.plan.cost import cost_packed, costs_of
from kvbridge.plan.lower import lower_plan, read_specs
from kvbridge.plan.rearrange import Rearrangement
from kvbridge.plan.staged import (
    StagedPortion,
    StagedTransfer,
    lower_staged_plan,
    staged_portions,
)
from kvbridge.plan.values import (
    BlockTable,
    Direction,
    Need,
    PlanOptions,
    RankPlan,
    ReadSpec,
    TransferBatch,
    whole_number,
)


@dataclass(frozen=True, eq=False)
class EngineTransferPlan:
    """What the local rank exchanges with one remote engine.

    Two plans are equal when they describe the same copies; the addresses that a plan is bound to
    are no part of that, so engines of one shape share one plan.

    Attributes:
        direction: ``"read"``: this rank consumes; ``"write"``: it produces.
        local_rank: Coordinate of this rank.
        local_groups: Cache groups of this engine, in the order of its block tables.
        remote_groups: Cache groups of the remote engine, in the order of its block tables.
        sources: Remote ranks that carry bytes, and what they carry.
        needs: What must be written, each exactly once.
        notify_only: Remote ranks that carry no bytes for us but that we must tell.
        readers: How many distinct ranks of our engine report to each remote rank.
        left_out: Layers of ours that the remote engine does not have.
        options: How the plan was made.
        binding: The addresses it is bound to, if any.
    """

    direction: Direction
    local_rank: Rank
    local_groups: tuple[CacheGroup, ...]
    remote_groups: tuple[CacheGroup, ...]
    sources: tuple[RankPlan, ...]
    needs: tuple[Need, ...]
    notify_only: tuple[Rank, ...]
    readers: Mapping[Rank, int]
    left_out: tuple[LayerKey, ...] = ()
    options: PlanOptions = PlanOptions()
    binding: Binding | None = field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        """Compare what is copied, not where it lies."""
        if not isinstance(other, EngineTransferPlan):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        """Hash what is copied."""
        return hash(self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the plan's content, stable across processes."""
        return document.fingerprint(self)

    @cached_property
    def strategy(self) -> Literal["direct", "staged"]:
        """The form that the options ask for, or the cheaper one if they leave it open.

        Of a plan that reads: one that writes is lowered directly, and may be packed besides.
        """
        if self.options.strategy != "auto":
            return self.options.strategy
        direct, staged = costs_of(self)
        return "staged" if self.direction == "read" and staged.total < direct.total else "direct"

    @cached_property
    def is_packed(self) -> bool:
        """Whether its bytes go packed when they are written, by the options or the cost.

        The reader's plan decides. Sessions pack the direct copies of either side's plan, see
        :class:`~kvbridge.plan.PackedStream`; a plan itself has no packed form.
        """
        if self.options.strategy != "auto":
            return self.options.strategy == "staged"
        return cost_packed(self).total < costs_of(self)[0].total

    @cached_property
    def is_packed_rather_than_staged(self) -> bool:
        """Whether having it packed takes less than reading whole pages.

        Pages hold what other ranks need, too; but only one side has to rearrange anything.
        """
        return cost_packed(self).total < costs_of(self)[1].total

    def check(self) -> None:
        """Prove that the plan covers exactly what it must.

        Raises:
            CoverageError: Some unit would be written never or twice, or leaves the memory that
                was announced; the message names layer, component and range.
        """
        check_plan(self)

    def explain(self) -> str:
        """Return the plan in words: who gives what, in how many pieces."""
        return document.explain(self)

    def to_json(self) -> str:
        """Return the plan as JSON, without addresses."""
        return document.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "EngineTransferPlan":
        """Read a plan back; it is unbound, and has been checked.

        Raises:
            PlanError: The text is no plan.
            CoverageError: It is a plan that does not cover what it must.
        """
        plan = cls(**document.parse(text))
        plan.check()
        return plan

    def bind(self, local: RankCache, remotes: Mapping[Rank, RankCache]) -> "EngineTransferPlan":
        """Return the plan bound to the addresses of two engines of this shape.

        Args:
            local: What this rank holds; as a consumer no more than the plan fills.
            remotes: Every rank of the other engine; those that carry no bytes may be left out.

        Raises:
            PlanError: The caches have another shape than the plan, or hold what it leaves empty.
            CoverageError: A piece lies outside the memory that a rank announced.
        """
        bound = replace(self, binding=bind_plan(self, local, remotes))
        if "fingerprint" in vars(self):
            vars(bound)["fingerprint"] = self.fingerprint
        return bound

    def lower(
        self,
        local_tables: Sequence[BlockTable],
        remote_tables: Sequence[BlockTable],
        *,
        start_token: int = 0,
        end_token: int,
    ) -> list[TransferBatch]:
        """Turn block tables into arrays of addresses.

        Moves the tokens ``start_token <= t < end_token``, each piece straight to its place:
        ``strategy`` is a matter of ``lower_staged`` alone. Pieces that touch on both sides are
        merged. Remote ranks with nothing to move are left out. A state moves whenever the
        destination's table lists its block, even if the range is empty.

        Args:
            local_tables: One table for each local cache group.
            remote_tables: One table for each remote cache group.
            start_token: First token to move.
            end_token: One past the last token to move.

        Raises:
            UnboundPlanError: The plan has no addresses.
            BlockTableError: A table does not cover the range, or lists impossible blocks.
        """
        if self.binding is None:
            raise UnboundPlanError("the plan has no addresses; bind it to two engines' caches")
        return lower_plan(self.binding, local_tables, remote_tables, start_token, end_token)

    def lower_staged(
        self,
        local_tables: Sequence[BlockTable],
        remote_tables: Sequence[BlockTable],
        *,
        start_token: int = 0,
        end_token: int,
        staging_address: int = 0,
    ) -> StagedTransfer:
        """Turn block tables into reads of whole pages, and a rearrangement for when they are here.

        Pages that hold scattered cells go into staging memory, everything else straight into the
        cache. Where the plan's strategy is direct, all of it does.

        Args:
            local_tables: One table for each local cache group.
            remote_tables: One table for each remote cache group.
            start_token: First token to move.
            end_token: One past the last token to move.
            staging_address: Start of registered memory that holds ``staging_nbytes`` of the
                result; 0 to learn how many those are.

        Raises:
            UnboundPlanError: The plan has no addresses.
            UnsupportedLayoutError: The plan writes: the consumer alone can rearrange.
            BlockTableError: A table does not cover the range, or lists impossible blocks.
            PlanError: The staging address is no address.
        """
        binding = self._readable()
        staging = whole_number("staging_address", staging_address)
        if not 0 <= staging < 1 << 63:
            raise PlanError(
                f"staging_address {staging:#x} is none; addresses are from 0 to 2**63 - 1: pass "
                "that of registered memory"
            )
        tables = (local_tables, remote_tables)
        if self.strategy == "direct":
            batches = self.lower(*tables, start_token=start_token, end_token=end_token)
            return StagedTransfer(batches, Rearrangement.nothing(), 0)
        return lower_staged_plan(binding, *tables, (start_token, end_token), staging)

    def staged_portions(
        self,
        local_tables: Sequence[BlockTable],
        remote_tables: Sequence[BlockTable],
        *,
        start_token: int = 0,
        end_token: int,
        most_nbytes: int,
        aim_nbytes: int | None = None,
    ) -> list[StagedPortion]:
        """Cut what ``lower_staged`` gives into portions that can be read one after the other.

        Together they move the same bytes; what goes straight into the cache is a portion of its
        own, the first one. Cells whose page alone would take too much go straight into the cache,
        too. The plan's strategy is not asked.

        Args:
            local_tables: One table for each local cache group.
            remote_tables: One table for each remote cache group.
            start_token: First token to move.
            end_token: One past the last token to move.
            most_nbytes: Staging memory that no portion exceeds.
            aim_nbytes: What none exceeds either, unless it is a single page; as ``most_nbytes``, if
                not given.

        Raises:
            UnboundPlanError: The plan has no addresses.
            UnsupportedLayoutError: The plan writes: the consumer alone can rearrange.
            BlockTableError: A table does not cover the range, or lists impossible blocks.
            PlanError: The sizes are none, or the wrong way round.
        """
        binding = self._readable()
        most = whole_number("most_nbytes", most_nbytes)
        aim = most if aim_nbytes is None else whole_number("aim_nbytes", aim_nbytes)
        if not 0 < aim <= most:
            raise PlanError(
                f"portions of {aim} bytes and at most {most} cannot be; give "
                "0 < aim_nbytes <= most_nbytes"
            )
        tokens = (start_token, end_token)
        return staged_portions(binding, local_tables, remote_tables, tokens, most, aim)

    def _readable(self) -> Binding:
        """Return the addresses, to read from there and to rearrange what arrives.

        Raises:
            UnboundPlanError: The plan has no addresses.
            UnsupportedLayoutError: The plan writes: the consumer alone can rearrange.
        """
        if self.binding is None:
            raise UnboundPlanError("the plan has no addresses; bind it to two engines' caches")
        if self.direction == "write":
            raise UnsupportedLayoutError(
                "a plan that writes has no staged form: what arrives is rearranged by the "
                "consumer; plan with direction='read' there"
            )
        return self.binding

    def read_specs(
        self,
        local_tables: Sequence[BlockTable],
        remote_tables: Sequence[BlockTable],
        *,
        start_token: int = 0,
        end_token: int,
    ) -> list[ReadSpec]:
        """Return the same in block ids, for people and logs.

        Raises:
            BlockTableError: A table is missing, or does not cover the range.
        """
        return read_specs(self, local_tables, remote_tables, start_token, end_token)
