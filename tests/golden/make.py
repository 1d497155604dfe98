"""Small plans to be read: what one rank of a small engine exchanges with another engine.

``python -m tests.golden.make`` writes them anew, next to this file; look at the difference.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbridge.plan import EngineTransferPlan, generate_engine_transfer_plan
from tests.property.engines import Direction, Engine, Layout, Model, Paging, even_shares
from tests.property.oracle import Fleet

FOLDER = Path(__file__).parent


def engine(
    heads: int,
    tp: int,
    *,
    stages: tuple[int, ...] = (1,),
    tokens: int = 16,
    axes: str = "BHNC",
    dcp: int = 1,
) -> Engine:
    shares = tuple(share for share in even_shares(heads, tp // dcp) for _ in range(dcp))
    return Engine(shares, stages, (Paging(tokens),), Layout(axes), dcp=dcp)


def plan(
    model: Model,
    producer: Engine,
    consumer: Engine,
    *,
    rank: tuple[int, int] = (0, 0),
    direction: Direction = "read",
) -> EngineTransferPlan:
    sides = Fleet(model, producer, "prefill"), Fleet(model, consumer, "decode")
    theirs, ours = sides if direction == "read" else sides[::-1]
    return generate_engine_transfer_plan(
        ours.topology(rank),
        ours.ranks[rank].cache,
        theirs.caches,
        local_engine=ours.caches,
        direction=direction,
    )


def attention_tp2_to_tp4() -> EngineTransferPlan:
    """Rank 1 of four takes the second half of rank 0's heads; pages are 16 and 32 tokens."""
    model = Model(("attention",) * 2, heads=4)
    producer, consumer = engine(4, 2, stages=(2,)), engine(4, 4, stages=(2,), tokens=32)
    return plan(model, producer, consumer, rank=(0, 1))


def replicated_heads_tp8_to_tp2() -> EngineTransferPlan:
    """Each of four heads has two owners; one of them is read, the other one is told."""
    return plan(Model(("attention",), heads=4), engine(4, 8), engine(4, 2))


def stages_pp2_to_pp1() -> EngineTransferPlan:
    """Layers come from the stage that has them, K and V apart there and together here."""
    model = Model(("attention",) * 3)
    producer = engine(1, 1, stages=(2, 1), axes="BKNHC")
    return plan(model, producer, engine(1, 1, stages=(3,)))


def latent_tp4_to_tp2() -> EngineTransferPlan:
    """All four ranks hold the same latent: rank 1 reads rank 2, and tells rank 3."""
    return plan(Model(("mla",)), engine(1, 4), engine(1, 2), rank=(0, 1))


def mamba2_tp1_to_tp2() -> EngineTransferPlan:
    """x and the temporal state are halved; B and C of one group are read whole."""
    return plan(Model(("mamba2",)), engine(1, 1), engine(1, 2), rank=(0, 1))


def token_shares_dcp2_to_dcp1() -> EngineTransferPlan:
    """Even tokens come from rank 0, odd ones from rank 1."""
    return plan(Model(("mla",)), engine(1, 2, dcp=2), engine(1, 1))


def window_hybrid() -> EngineTransferPlan:
    """Two cache groups, one of which keeps a window."""
    model = Model(("attention", "sliding_window"), heads=2, window=64)
    return plan(model, engine(2, 2, stages=(2,)), engine(2, 1, stages=(2,)))


def push_tp2_to_tp4() -> EngineTransferPlan:
    """Rank 0 writes to both ranks that hold a copy of its head."""
    return plan(Model(("attention",), heads=2), engine(2, 2), engine(2, 4), direction="write")


PLANS: dict[str, Callable[[], EngineTransferPlan]] = {
    make.__name__: make
    for make in (
        attention_tp2_to_tp4,
        replicated_heads_tp8_to_tp2,
        stages_pp2_to_pp1,
        latent_tp4_to_tp2,
        mamba2_tp1_to_tp2,
        token_shares_dcp2_to_dcp1,
        window_hybrid,
        push_tp2_to_tp4,
    )
}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def text_of(name: str) -> str:
    return _text(json.loads(PLANS[name]().to_json())) + "\n"


def _text(value: Any, indent: str = "") -> str:
    """Return a value on one line where it fits, so that a plan is short enough to be read."""
    line = json.dumps(value)
    if len(indent) + len(line) <= 90 or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_text(each, inner)}" for key, each in value.items()]
    else:
        items = [_text(each, inner) for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"


def main() -> None:
    for name in PLANS:
        path_of(name).write_text(text_of(name))


if __name__ == "__main__":
    main()
