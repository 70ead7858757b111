"""On real ranks: how often DeepSpeed asks its accelerator to wait for the device in an ordinary step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.backends.base import Backend, World
from harness.backends.presets import TIMER_WAITS
from tests.contract.cases import global_batches
from tests.contract.communication import VolumeCase, prepare, take_step

PRESETS = ("like-for-like", "library-defaults")
ACCUMULATION_STEPS = 2
FIRST_STEPS = 2
"""Those that DeepSpeed's timer leaves out."""


def device_waits(backend: Backend, world: World) -> list[tuple[int, bool]]:
    """(waits counted in one step, whether the engine says that its timer waits) under each preset."""
    return [_waits(backend, world, preset) for preset in PRESETS]


def _waits(backend: Backend, world: World, preset: str) -> tuple[int, bool]:
    case = VolumeCase(ACCUMULATION_STEPS, "fp32", preset, tied=True, clipping=None, family="gpt2")
    engine, *_ = prepare(backend, world, case)
    batches = list(global_batches())
    for batch in batches[:FIRST_STEPS]:
        take_step(engine, batch, world, case, None)
    with _counting() as calls:
        take_step(engine, batches[FIRST_STEPS], world, case, None)
    reported = engine.effective().details[TIMER_WAITS]
    engine.close()
    return len(calls), reported


@contextmanager
def _counting() -> Iterator[list[None]]:
    from deepspeed.accelerator import get_accelerator

    accelerator, calls = get_accelerator(), []
    accelerator.synchronize = lambda *_: calls.append(None)
    try:
        yield calls
    finally:
        del accelerator.synchronize
