"""On real ranks: what an engine holds after a backward pass, case by case."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from harness.backends.base import Backend, Engine, Unsupported, World
from harness.rank.probes.memory import AllocatorProbe, live_bytes_by_kind
from harness.record import LayoutPart
from tests.contract.cases import global_batches
from tests.contract.communication import VolumeCase, prepare, run_micro_steps, take_step


def _case(accumulation_steps: int, precision: str, preset: str = "like-for-like") -> VolumeCase:
    """A model whose odd width makes every kind of padding appear."""
    return VolumeCase(accumulation_steps, precision, preset, tied=True, clipping=None, family="gpt2")


STATE_CASES = (
    _case(2, "fp32"),
    _case(1, "bf16-mixed"),
    _case(2, "bf16-mixed"),
    _case(2, "bf16-mixed", "library-defaults"),
    _case(1, "bf16"),
    _case(2, "bf16"),
)
FEW_CASES = STATE_CASES[:3:2]
"""At full and at low precision, with several micro-steps."""
LLAMA_CASES = tuple(replace(case, family="llama") for case in STATE_CASES)
STEPS_BEFORE = 2
"""From the second step on optimizers have their states."""


@dataclass
class Held:
    """What one rank of one case held."""

    kinds: dict[str, int]
    layout: LayoutPart
    shard_size: int | None


def states_of_cases(backend: Backend, world: World) -> list[Held | None]:
    """One for each case, None where the library cannot run it."""
    return [_states(backend, world, case) for case in STATE_CASES]


def states_of_few(backend: Backend, world: World) -> list[Held | None]:
    """The same of two cases."""
    return [_states(backend, world, case) for case in FEW_CASES]


def states_of_llama(backend: Backend, world: World) -> list[Held | None]:
    """The same of a model whose attention can be exchanged."""
    return [_states(backend, world, case) for case in LLAMA_CASES]


def _states(backend: Backend, world: World, case: VolumeCase) -> Held | None:
    try:
        engine, layout, _ = prepare(backend, world, case)
    except Unsupported:
        return None
    batches = list(global_batches())
    for batch in batches[:STEPS_BEFORE]:
        take_step(engine, batch, world, case, None)
    run_micro_steps(engine, batches[STEPS_BEFORE], world, case, None)
    kinds = held_kinds(engine)
    shard_size = engine.effective().details.get("shard_size")
    engine.close()
    return Held(kinds, layout, shard_size)


def held_kinds(engine: Engine) -> dict[str, int]:
    """Live bytes by kind, with those that the library's own code holds."""
    inside = live_bytes_by_kind(engine.state_tensors(), AllocatorProbe()).inside
    assert inside is not None
    return dict(Counter(inside) + Counter(engine.hidden_bytes()))
