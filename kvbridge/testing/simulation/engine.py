"""A simulated engine: it schedules, computes, loads, gives, and calls a connector's hooks."""

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kvbridge.connector import Loaded
from kvbridge.connector.gather import ReportGatherer
from kvbridge.model import Rank
from kvbridge.testing.simulation import checks, rules
from kvbridge.testing.simulation.deadlines import POLLS, check_deadlines
from kvbridge.testing.simulation.jobs import Leg, Offer
from kvbridge.testing.simulation.memory import Pool
from kvbridge.testing.simulation.ranks import Ranks, Seat
from kvbridge.testing.simulation.scenario import Shape

if TYPE_CHECKING:
    from kvbridge.testing.simulation.plant import Plant

STEP_S = (0.015, 0.05)
CHUNK_TOKENS = (8, 48)
AHEAD_TOKENS, AHEAD_OFTEN = (3, 12), 8
"""Where somebody waits for each chunk, there are more of them, and more of them are lost."""
RESTS, TELLS = 0.5, 0.7
"""Shares of sleeps without any cache for a while, and of those of which other engines are told."""


class Engine(Ranks):
    """An engine, from a start to its end.

    Attributes:
        generation: How often it has had another cache.
        pool: Its blocks.
        reports: What its ranks have reported, put together.
        waiting: Requests without blocks.
        loading: Those whose tokens are being loaded, by id.
        running: Those that are computed.
        held: Those that have ended and whose blocks are kept for readers, by id.
        draining_s: Clock when nothing is kept any longer, since it is drained; None if it is not.
        full_s: Clock until which nothing new has a place.
    """

    def __init__(self, plant: "Plant", index: int, shape: Shape, start: int) -> None:
        """Start, register, publish, and step from then on."""
        super().__init__(plant, index, shape, start)
        self.generation = 1
        self.pool = Pool(shape.blocks)
        self.reports = ReportGatherer(self.seats)
        self.waiting: list[Leg] = []
        self.loading: dict[str, Leg] = {}
        self.running: list[Leg] = []
        self.held: dict[str, Leg] = {}
        self._to_wake: list[Rank] | None = None
        self._wakes_busy = False
        self._to_release: list[Rank] = []
        self._rests_s = self._wakes_s = 0.0
        self._tells = False
        self.draining_s: float | None = None
        self.full_s = 0.0
        self._polls = 0  # while it should have been drained
        self.world.note(self.name, 0, f"starts as {self.incarnation}: {shape}")
        self.world.after(self.world.rng.uniform(*STEP_S), self._step)

    # --- steps -----------------------------------------------------------------------------------

    def _step(self) -> None:
        """Schedule; then each rank works, some later than others; then look at what they report."""
        if not self.alive:
            return
        rng, world = self.world.rng, self.world
        self._wake_up()
        if self._to_wake is None:
            if self.draining_s is None:
                self._admit()
            self._say_progress()
            self._compute()
        metadata = self.hook("build_connector_meta", self.scheduler.build_connector_meta)
        begun = [leg for leg in self.loading.values() if leg.begun_s == float("inf")]
        begun += [leg for leg in self.held.values() if leg.begun_s == float("inf")]
        for leg in begun:
            leg.told_s = min(leg.told_s, world.now_s)
        length_s = world.rest_s or rng.uniform(*STEP_S)
        if world.chance(self.scenario.faults.stall):
            length_s = rng.uniform(0.1, 1.5) * self.scenario.lease_s
            world.note(self.name, 0, f"stalls for {length_s:.3f} s")
        several = len(self.seats) > 1
        for rank, seat in self.seats.items():
            delay_s = 0.9 * length_s * rng.random() if several else 0.0
            world.after(delay_s, partial(self._work, rank, seat, metadata))
        world.after(length_s, partial(self._look, begun))

    def _work(self, rank: Rank, seat: Seat, metadata: object) -> None:
        if not self.alive:
            return
        self.hook("start_load_kv", seat.connector.start_load_kv, metadata)
        report = self.hook("get_finished", seat.connector.get_finished)
        if report is not None:
            self.reports.add(rank, report)

    def _look(self, begun: list[Leg]) -> None:
        if not self.alive:
            return
        for leg in begun:
            leg.begun_s = self.world.now_s
        report = self.reports.take()
        self.hook("update_connector_output", self.scheduler.update_connector_output, report)
        for request_id in sorted(report.loaded):
            self._loaded(request_id, report.loaded[request_id])
        for request_id in sorted(report.sent):
            self._sent(request_id, expired=request_id in report.expired)
        if self.reports.repeated:
            self.world.violate(rules.ONCE, "a rank has reported twice", 0, self.name)
        if self._to_wake is None:
            for leg in [leg for leg in self.running if leg.linger < 0]:
                self.finish(leg)
        check_deadlines(self)
        if self.draining_s is not None and self._is_drained(self.draining_s):
            self.plant.ended(self)
        self.world.after(0.0, self._step)

    # --- scheduling ------------------------------------------------------------------------------

    def add(self, leg: Leg) -> None:
        """Take a request."""
        self.waiting.append(leg)
        giver = self.plant.giver_of(leg)
        if giver is not None:
            ids = [offer.transfer_id for offer in giver.offers.values()]
            self.plant.build.network.renewals.begins(self.name, ids)
        self.world.note(self.name, leg.job.number, f"takes it: {leg.tokens} tokens, {leg.hit} here")

    def _admit(self) -> None:
        for leg in list(self.waiting):
            number, request_id = leg.job.number, leg.job.request_id
            if any(request_id == other.job.request_id for other in self.running):
                continue  # an engine runs one request of a name
            matched, _ = self.hook(
                "get_num_new_matched_tokens",
                self.scheduler.get_num_new_matched_tokens,
                leg.request,
                leg.hit,
            ) or (None, False)
            if matched:
                leg.asked_s = min(leg.asked_s, self.world.now_s)
            if matched is None or self.world.now_s < self.full_s:
                continue
            count = -(-leg.tokens // self.shape.block_tokens)
            if not leg.decodes:
                first = min(leg.tokens, max(CHUNK_TOKENS[0], leg.hit))
                count = -(-first // self.shape.block_tokens)
            blocks = self.pool.take(count)
            if blocks is None:
                return
            self.waiting.remove(leg)
            leg.blocks += blocks
            leg.generation = self.generation
            self.hook(
                "update_state_after_alloc",
                self.scheduler.update_state_after_alloc,
                leg.request,
                (tuple(leg.blocks),),
                matched,
            )
            self.write(leg, 0, leg.hit)
            leg.computed = leg.hit
            if matched and request_id in self.loading:
                text = f"{matched} tokens are offered while an earlier load of that name runs"
                self.world.violate(rules.ONCE, text, number, self.name)
            if matched:
                leg.state, leg.end, leg.polls = "loading", leg.hit + matched, 0
                leg.told_s = leg.begun_s = float("inf")
                self.loading[request_id] = leg
                self.world.note(
                    self.name, number, f"loads tokens {leg.hit}..{leg.end} into blocks {blocks}"
                )
            else:
                leg.state = "running"
                self.running.append(leg)

    def _say_progress(self) -> None:
        """Say how far those requests are that somebody waits for."""
        for leg in self.running:
            if leg.goes_ahead and leg.computed:
                progressed = self.scheduler.request_progressed
                self.hook("request_progressed", progressed, leg.request, (tuple(leg.blocks),))

    def _compute(self) -> None:
        """Compute a chunk of each running request, or decode."""
        rng = self.world.rng
        for leg in list(self.running):
            if leg.state != "running":
                continue  # preempted by an earlier one
            if leg.computed == leg.tokens:
                leg.linger -= 1
                continue
            ahead = leg.goes_ahead
            end = min(
                leg.computed + rng.randint(*AHEAD_TOKENS if ahead else CHUNK_TOKENS), leg.tokens
            )
            more = -(-end // self.shape.block_tokens) - len(leg.blocks)
            while more > len(self.pool.free) and self.running[-1] is not leg:
                self._preempt(self.running[-1])
            blocks = self.pool.take(max(more, 0))
            often = AHEAD_OFTEN if ahead else 1
            if blocks is None or self.world.chance(often * self.scenario.faults.preempted):
                self.pool.free += blocks or []
                self._preempt(leg)
                continue
            leg.blocks += blocks
            self.write(leg, leg.computed, end)
            leg.computed = end

    def _preempt(self, leg: Leg) -> None:
        self.world.note(self.name, leg.job.number, f"preempts it, and frees blocks {leg.blocks}")
        self.running.remove(leg)
        self.hook("request_preempted", self.scheduler.request_preempted, leg.request)
        for seat in self.seats.values():
            for agent in seat.agents.values():
                self.plant.build.fabric.ledger.loses(agent, leg.source_id)
        self._free(leg)
        leg.state, leg.computed, leg.hit = "waiting", 0, 0
        self.waiting.append(leg)

    def finish(self, leg: Leg) -> None:
        """End a request that has blocks or waits for them."""
        number = leg.job.number
        if leg in self.running:
            self.running.remove(leg)
        elif leg in self.waiting:
            self.waiting.remove(leg)
        if leg.state == "running" and leg.computed:
            checks.check_bytes(leg, 0, leg.computed, "when it finished")
        holds, taken = self.hook(
            "request_finished", self.scheduler.request_finished, leg.request, (tuple(leg.blocks),)
        ) or (False, None)
        if holds and not leg.aborted:
            leg.state, leg.polls = "held", 0
            leg.told_s = leg.begun_s = float("inf")
            entries = (taken or {})["kvbridge"]["children"]
            leg.offers = {
                name: Offer(entry["remote_request_id"], *entry["remote_lease"])
                for name, entry in entries.items()
            }
            leg.ended_s = self.world.now_s
            leg.kept_s = leg.ended_s + self.scenario.lease_s
            leg.until_s = dict.fromkeys(leg.offers, leg.kept_s)
            self.held[leg.job.request_id] = leg
            if self.draining_s is not None:
                self.world.violate(rules.DRAINED, "it offers blocks", number, self.name)
            for name, offer in leg.offers.items() if not leg.job.goes_ahead else ():
                for seat in self.seats.values():
                    seat.agents[name].begin(offer.transfer_id)
            self.world.note(self.name, number, f"has computed it, holds blocks {leg.blocks}")
        elif leg.state != "loading":
            leg.state = "over"
            self._free(leg)
        self.plant.traffic.ended(leg, taken)

    def abort(self, leg: Leg) -> None:
        """End a request that nobody wants any more."""
        self.world.note(self.name, leg.job.number, f"aborts it while {leg.state}")
        leg.aborted = True
        if leg.state in {"waiting", "loading", "running"}:
            self.finish(leg)

    # --- what workers report ---------------------------------------------------------------------

    def _loaded(self, request_id: str, loaded: Loaded) -> None:
        leg = self.loading.pop(request_id, None)
        if leg is None:
            self.world.violate(
                rules.ONCE, f"the load of {request_id} is reported, and none runs", 0, self.name
            )
            return
        number = leg.job.number
        checks.check_quiet(leg, "its load was reported")
        self.world.note(self.name, number, f"load ended: {loaded.error or 'success'}")
        lost = leg.generation != self.generation
        leg.error = loaded.error or ("its cache is gone" if lost else "")
        if loaded.ok:
            checks.check_bytes(leg, 0, leg.end, "it was loaded")
        elif not lost:
            checks.check_bytes(leg, 0, leg.hit, "what was here, after its load failed")
            checks.check_cause(leg)
            checks.check_policy(leg, loaded)
            checks.check_renewed(leg)
        if leg.aborted:
            leg.state = "over"
            self._free(leg)
            return
        leg.state = "running"
        if lost:
            self.running.append(leg)
            self._preempt(leg)
        elif loaded.ok:
            leg.computed = leg.end
            self.running.append(leg)
        elif loaded.recompute:
            self.running.append(leg)
        else:
            self.finish(leg)

    def _sent(self, request_id: str, *, expired: bool) -> None:
        leg = self.held.pop(request_id, None)
        if leg is None:
            self.world.violate(
                rules.ONCE, f"{request_id} is reported as sent, and is not held", 0, self.name
            )
            return
        leg.expired = expired
        self.world.note(
            self.name,
            leg.job.number,
            f"frees blocks {leg.blocks}, {'expired' if expired else 'sent'}",
        )
        checks.check_given_back(leg)
        if expired:
            checks.check_told(leg)
            checks.check_promise(leg)
        checks.check_bytes(leg, 0, leg.computed, "what was held for readers")
        leg.state = "over"
        self._free(leg)

    # --- blocks ----------------------------------------------------------------------------------

    def _free(self, leg: Leg) -> None:
        """Give blocks back: they are overwritten at once, and the first to be used again."""
        checks.check_quiet(leg, "its blocks were freed")
        leg.over_s = self.world.now_s
        if leg.blocks:
            for seat in self.seats.values():
                seat.arena.poison(leg.blocks)
        self.pool.free += leg.blocks
        leg.blocks = []

    # --- disasters -------------------------------------------------------------------------------

    def kill(self) -> list[Leg]:
        """End without a word; return what was under way."""
        self.world.note(self.name, 0, f"{self.incarnation} is killed")
        self.die()
        return self.requests

    @property
    def requests(self) -> list[Leg]:
        """Every request that it has."""
        return [*self.waiting, *self.loading.values(), *self.running, *self.held.values()]

    def drain(self, within_s: float) -> None:
        """Begin to end in order."""
        if self.draining_s is not None or not self.alive:
            return
        self.world.note(self.name, 0, f"is drained, within {within_s:.3f} s")
        self.hook("drain", self.scheduler.drain, within_s)
        self.draining_s = end_s = self.world.now_s + within_s
        for leg in self.held.values():
            leg.until_s = {name: min(at_s, end_s) for name, at_s in leg.until_s.items()}

    def _is_drained(self, end_s: float) -> bool:
        """Whether it says that nothing is kept for others; that must be so, and in time."""
        drained = self.hook("drained", lambda: self.scheduler.drained)
        busy = [*self.held, *self.loading]
        if drained and busy:
            text = f"it says that it is drained, with {busy} loaded or held"
            self.world.violate(rules.DRAINED, text, 0, self.name)
        if not drained and not busy and self.world.now_s > end_s:
            self._polls += 1
        if self._polls > POLLS:
            text = "nothing is held or loaded, and it does not say that it is drained"
            self.world.violate(rules.DRAINED, text, 0, self.name)
        return bool(drained) and self.alive

    @property
    def sleeps(self) -> bool:
        """Whether it is about to take another cache."""
        return self._to_wake is not None

    def sleep(self, *, busy: bool) -> None:
        """Take another cache: as soon as no load is under way, or at once."""
        if self._to_wake is None and self.alive:
            self.world.note(self.name, 0, f"sleeps{', with loads under way' if busy else ''}")
            self._to_wake, self._wakes_busy = list(self.seats), busy
            for leg in list(self.running):
                self._preempt(leg)
            # Of its own, so that it does not change what else happens in a run.
            rng = Random(f"sleep {self.scenario.seed} {self.incarnation} {self.generation}")
            if rng.random() < RESTS:
                self._to_release = list(self.seats)
                self._rests_s = rng.uniform(0.0, 2 * self.scenario.lease_s)
                self._tells = rng.random() < TELLS

    def _has_rested(self) -> bool:
        """Give the memory of the ranks back, if it is to have none for a while."""
        for rank in list(self._to_release):
            seat = self.seats[rank]
            if not self.unregister(seat):
                return False  # again at the next step
            seat.arena.poison()
            self._to_release.remove(rank)
            self._lose()
            self.world.note(self.name, 0, f"has no cache any more on rank {rank}")
            if not self._to_release:
                self._wakes_s = self.world.now_s + self._rests_s
                if self._tells:
                    self.hook("unregister_kv_caches", self.scheduler.unregister_kv_caches)
        return self.world.now_s >= self._wakes_s

    def _lose(self) -> None:
        """Take note that a part of every request's cache is gone."""
        for leg in (*self.loading.values(), *self.running, *self.held.values()):
            leg.generation = 0

    def _wake_up(self) -> None:
        if self._to_wake is None or (self.loading and not self._wakes_busy):
            return
        if not self._has_rested():
            return
        for rank in list(self._to_wake):
            seat = self.seats[rank]
            arena = self.new_arena(rank)
            if not self.register(rank, seat, arena):
                return  # again at the next step
            seat.arena.poison()
            seat.arena = arena
            self._to_wake.remove(rank)
            self._lose()
        self._to_wake = None
        for leg in list(self.running):
            self._preempt(leg)
        self.generation += 1
        self.publish()
        self.world.note(self.name, 0, f"wakes up with cache {self.generation}")

    def relatives(self, leg: Leg) -> tuple[str, ...]:
        """Return the names of the engines that a leg has to do with."""
        there = (leg.params or {}).get("remote_engine_id")
        return (self.name, str(there)) if there else (self.name,)
