"""The clients, and the proxy between them and the engines."""

import json
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from kvbridge.testing.simulation.jobs import Job, Leg
from kvbridge.testing.simulation.scenario import TOKENS_MAX, TOKENS_MEAN

if TYPE_CHECKING:
    from kvbridge.testing.simulation.engine import Engine
    from kvbridge.testing.simulation.plant import Plant

NETWORK_S = (0.0005, 0.01)


class Traffic:
    """Sends jobs to engines that prefill, and what these return to engines that decode.

    Attributes:
        outcomes: How jobs have ended, counted.
        begun: Jobs that have come.
        open: Those that have not ended, by number.
        keys: Whose content a key is.
        givers: Legs whose blocks are offered, by what their readers call them.
    """

    def __init__(self, plant: "Plant") -> None:
        """Begin to send."""
        self.plant, self.world, self.scenario = plant, plant.world, plant.scenario
        self.outcomes: Counter[str] = Counter()
        self.begun = 0
        self.open: dict[int, Job] = {}
        self.keys: dict[int, str] = {}
        self.givers: dict[tuple[str, str], Leg] = {}
        self._readers: dict[tuple[str, str], list[Leg]] = {}
        self.world.after(0.0, self._arrive)

    @property
    def is_over(self) -> bool:
        """Whether every job has come and ended."""
        return self.begun == self.scenario.requests and not self.open

    def _arrive(self) -> None:
        rng = self.world.rng
        if len(self.open) >= self.scenario.open_max:
            self.world.after(rng.uniform(0.02, 0.1), self._arrive)
            return
        self.begun += 1
        tokens = min(1 + int(rng.expovariate(1 / TOKENS_MEAN)), TOKENS_MAX)
        self._begin(f"r{self.begun}", tokens, retried=False)
        if self.begun < self.scenario.requests:
            self.world.after(rng.expovariate(self.scenario.rate), self._arrive)

    def probe(self, giver: "Engine", taker: "Engine") -> Job:
        """Send a request from one engine to another."""
        return self._begin(
            f"probe{self.world.number()}", TOKENS_MAX // 2, retried=True, giver=giver, taker=taker
        )

    def readers(self, giver: Leg) -> list[Leg]:
        """Return the legs that were given what another one holds."""
        ids = {offer.transfer_id for offer in giver.offers.values()}
        return [leg for i in sorted(ids) for leg in self._readers.get((giver.engine.name, i), [])]

    def _begin(
        self,
        request_id: str,
        tokens: int,
        *,
        retried: bool,
        giver: "Engine | None" = None,
        taker: "Engine | None" = None,
    ) -> Job:
        world, faults = self.world, self.scenario.faults
        job = Job(
            number=world.number(),
            request_id=request_id,
            key=world.rng.getrandbits(64),
            tokens=tokens,
            due_s=world.now_s + self.scenario.patience_s,
            retried=retried,
            goes_to=taker,
        )
        self.open[job.number] = job
        self.keys[job.key] = f"r{job.number}"
        world.note("", job.number, f"comes as {request_id!r}, {tokens} tokens")
        world.after(self.scenario.patience_s, partial(self._abort, job, "nobody waits any more"))
        if world.chance(faults.abort):
            world.after(world.rng.uniform(0.0, 0.4), partial(self._abort, job, "is aborted"))
        engine = giver or self._engine("consumer")
        if engine is None:
            self._end(job, "no engine")
            return job
        params: dict[str, Any] = {"do_remote_decode": True}
        job.goes_ahead = bool(self.scenario.ahead) and world.chance(self.scenario.ahead)
        if job.goes_ahead:
            params["transfer_id"] = f"x{job.number}"
        job.leg = Leg(job, engine, params, tokens, linger=world.rng.randint(0, 1))
        engine.add(job.leg)
        if job.goes_ahead:
            self.givers[engine.name, job.leg.source_id] = job.leg
            address = self.plant.build.address_of(engine)
            asks = {
                "do_remote_prefill": True,
                "remote_engine_id": engine.name,
                "remote_host": address.host,
                "remote_port": address.port,
                "remote_num_tokens": tokens,
                "transfer_id": params["transfer_id"],
            }
            delay_s = world.rng.uniform(*NETWORK_S)
            world.after(delay_s, partial(self._decode, self._twin(job), engine.name, asks))
        return job

    def _engine(self, but_role: str, *but: str) -> "Engine | None":
        """Return an engine that is there and has another role."""
        fit = [
            engine
            for engine in self.plant.engines
            if engine.alive
            and engine.draining_s is None
            and engine.shape.role != but_role
            and engine.name not in but
        ]
        return self.world.rng.choice(fit) if fit else None

    def _abort(self, job: Job, why: str) -> None:
        if job.outcome:
            return
        leg = job.leg
        self._end(job, "aborted")
        self.world.note("", job.number, why)
        if leg is None or not leg.engine.alive or leg.state in {"held", "over"}:
            return
        leg.engine.abort(leg)
        if job.retried or not leg.decodes or leg.waits:
            return
        if self.world.chance(self.scenario.faults.elsewhere):
            self._decode(self._twin(job), leg.engine.name, leg.params)
        elif self.world.chance(self.scenario.faults.again):
            self._begin(job.request_id, job.tokens, retried=True, giver=self._giver(leg))

    def ended(self, leg: Leg, taken: dict[str, Any] | None) -> None:
        """Take note that an engine is done with a request, and send it on."""
        job, world, faults = leg.job, self.world, self.scenario.faults
        if leg.state == "held" and taken is not None:
            self.givers[leg.engine.name, taken["remote_request_id"]] = leg
        if job.outcome:
            return
        if job.goes_ahead and not leg.decodes:
            self._end(job, "went ahead")
            return
        if not leg.decodes:
            job.leg = None
            delay_s = world.rng.uniform(*NETWORK_S)
            if world.chance(faults.never_comes):
                return  # until the client's patience ends
            if world.chance(faults.comes_late):
                delay_s = world.rng.uniform(0.5, 1.5) * self.scenario.lease_s
            world.after(delay_s, partial(self._decode, job, leg.engine.name, taken))
            return
        if leg.computed < leg.tokens:
            self._failed(leg)
        elif leg.error:
            self._end(job, f"recomputed: {reason(leg.error)}")
        else:
            self._end(job, "success")
            if taken is not None:
                delay_s = world.rng.uniform(*NETWORK_S)
                world.after(delay_s, partial(self._decode, self._twin(job), leg.engine.name, taken))

    def _failed(self, leg: Leg) -> None:
        """End a request that was not loaded, or try again."""
        job, world, faults = leg.job, self.world, self.scenario.faults
        if not job.retried and world.chance(faults.elsewhere):
            job.retried = True
            again = partial(self._decode, job, leg.engine.name, leg.params)
            world.after(world.rng.uniform(*NETWORK_S), again)
            return
        self._end(job, f"failed: {reason(leg.error)}")
        if not job.retried and world.chance(faults.again):
            self._begin(job.request_id, job.tokens, retried=True, giver=self._giver(leg))

    def _twin(self, job: Job) -> Job:
        """Return the next turn of a job: the same content, in another engine."""
        twin = Job(
            number=self.world.number(),
            request_id=job.request_id,
            key=job.key,
            tokens=job.tokens,
            due_s=self.world.now_s + self.scenario.patience_s,
            retried=True,
        )
        self.open[twin.number] = twin
        self.world.note("", twin.number, f"is the next turn of r{job.number}")
        self.world.after(self.scenario.patience_s, partial(self._abort, twin, "nobody waits"))
        return twin

    def _decode(self, job: Job, giver: str, params: dict[str, Any] | None) -> None:
        if job.outcome:
            self._turn_away(job, params)
            return
        world, rng = self.world, self.world.rng
        source = str((params or {}).get("remote_engine_id"))
        engine = job.goes_to or self._engine("producer", giver, source)
        if engine is None:
            self._end(job, "no engine")
            return
        if params is None:
            params = {}
        else:
            params = json.loads(json.dumps(params))
            if not job.retried and world.chance(self.scenario.faults.turns_back):
                params["do_remote_decode"] = True
        tokens = min(max(1, job.tokens + rng.choice((0, 0, 0, -2, 1))), TOKENS_MAX)
        size = engine.shape.block_tokens
        hit = rng.choice((0, 0, 0, tokens // 2 // size * size, tokens // size * size))
        if rng.random() < 0.03:
            hit = tokens  # nothing is to be loaded
        if job.goes_to is not None:
            hit = 0
        job.leg = Leg(job, engine, params, tokens, hit, linger=rng.randint(0, 3))
        self._reads(job.leg)
        engine.add(job.leg)

    def _giver(self, leg: Leg) -> "Engine | None":
        """Return the engine that prefilled a request, if it is still there."""
        giver = self.plant.giver_of(leg)
        return giver.engine if giver is not None and giver.engine.alive else None

    def _reads(self, leg: Leg) -> None:
        giver = self.plant.giver_of(leg)
        if giver is not None:
            key = (giver.engine.name, leg.source_id)
            self._readers.setdefault(key, []).append(leg)

    def _turn_away(self, job: Job, params: dict[str, Any] | None) -> None:
        """Have an engine refuse a request that its client has left: it tells the other engine."""
        engine = self._engine("producer", (params or {}).get("remote_engine_id", ""))
        if engine is not None and params is not None and self.world.rng.random() < 0.7:
            leg = Leg(job, engine, params, job.tokens)
            self._reads(leg)
            engine.waiting.append(leg)
            engine.abort(leg)

    def lost(self, legs: list[Leg]) -> None:
        """Take note of what has gone with an engine."""
        for leg in legs:
            leg.state = "over"
            if not leg.job.outcome and leg.job.leg is leg:
                self._end(leg.job, "engine killed")

    def _end(self, job: Job, outcome: str) -> None:
        if job.outcome:
            self.world.violate("everything ends once", f"{job.outcome}, {outcome}", job.number)
        job.outcome = outcome
        self.outcomes[outcome] += 1
        self.open.pop(job.number, None)
        self.world.note("", job.number, f"ends: {outcome}")


def reason(error: str) -> str:
    """Return the kind of an error."""
    for words, kind in _REASONS.items():
        if words in error:
            return kind
    return "the transport failed" if error else "unknown"


_REASONS = {
    "lease was over": "lease over",
    "lease had not begun": "lease not begun",
    "had not ended": "timed out",
    "had not said that they have written": "timed out",
    "had not said whether they can reach": "timed out",
    "not ready in time": "timed out",
    "kept no longer": "lease over",
    "under another lease": "lease over",
    "is not connected": "handshake failed",
    "did not say within": "handshake failed",
    "cannot write what": "push refused",
    "before it had answered": "writer lost",
    "was not met": "not met in time",
    "has restarted": "restarted",
    "registered other memory": "other memory",
    "gone again": "gone again",
    "no cache": "asleep",
    "cache is gone": "own cache gone",
    "nobody answers": "handshake failed",
    "no answer": "handshake failed",
    "the peer refused": "handshake failed",
    "does not answer": "handshake failed",
}
