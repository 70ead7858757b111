"""On real ranks: what an engine trains, communicates, holds, loads and saves, case by case."""

import hashlib
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from harness.backends.base import Backend, Effective, Engine, Unsupported, World
from harness.backends.model_source import AskedLoading
from harness.backends.presets import TIMER_WAITS
from harness.forms.layout import Layout
from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.memory import AllocatorProbe, live_bytes_by_kind
from harness.record import ModelPart
from tests.contract.cases import (
    FOLDER,
    Case,
    global_batches,
    prepare,
    run_micro_steps,
    take_step,
)

ACTIVE_CLIPPING = 0.5
"""Below every gradient norm of these cases, so that clipping acts at each step."""
TRAINED = [
    Case(steps, clipping=clipping, tied=tied)
    for steps, clipping, tied in product((1, 2), (None, ACTIVE_CLIPPING), (True, False))
]
RECOMPUTED = (
    Case(1, tied=False, activation_checkpointing=True),
    Case(2, "bf16-mixed", tied=False, activation_checkpointing=True),
    Case(2, "fp32", "library-defaults", tied=False, activation_checkpointing=True),
    Case(family="gpt2", activation_checkpointing=True),
)
HELD = [
    # A model whose odd width makes every kind of padding appear.
    Case(2, family="gpt2"),
    Case(1, "bf16-mixed", family="gpt2"),
    Case(2, "bf16-mixed", family="gpt2"),
    Case(2, "bf16-mixed", "library-defaults", family="gpt2"),
    Case(1, "bf16", family="gpt2"),
    Case(2, "bf16", family="gpt2"),
]
LOADED = [
    Case(1, precision, tied=family != "llama", family=family)
    for precision, family in product(("fp32", "bf16-mixed"), ("llama", "gpt2"))
]
"""The widths of the second family divide by no number of ranks."""
CASES: dict[str, list[Case]] = {
    "trained": TRAINED,
    # Accumulated and clipped, tied and not: for engines whose parts have all cases under another label.
    "hardest": TRAINED[-2:],
    "counted": [
        Case(1, clipping=1.0),
        Case(2, "bf16-mixed", tied=False),
        Case(2, "bf16-mixed", "library-defaults", clipping=1.0),
    ],
    "recomputed, two architectures": [*RECOMPUTED],
    "recomputed, one architecture": [*RECOMPUTED[:3]],
    "first steps": [Case(1, "bf16-mixed", clipping=1.0, probed_step=step) for step in (0, 1)],
    "held": HELD,
    # At full and at low precision, with several micro-steps.
    "held, few": HELD[:3:2],
    # Of a model whose attention can be exchanged.
    "held, one architecture": [replace(case, family="llama") for case in HELD],
    "loaded": LOADED,
    "loaded, few": [LOADED[0], LOADED[3]],
}
"""By name: what a deed is done with."""


@dataclass
class Trace:
    """What one training left behind."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def train(backend: Backend, world: World, cases: str) -> list[Trace]:
    """Losses are this rank's share of the mean per target token of the global batch."""
    return [_train(backend, world, case) for case in CASES[cases]]


def _train(backend: Backend, world: World, case: Case) -> Trace:
    engine, *_ = prepare(backend, world, case)
    taken = [take_step(engine, batch, world, case) for batch in global_batches()]
    trace = Trace([loss for loss, _ in taken], [norm for _, norm in taken], dict(engine.full_parameters()))
    engine.close()
    return trace


@dataclass
class Counted:
    """What one rank of one case left behind."""

    layout: Layout
    model: ModelPart
    effective: Effective
    rows: list[dict[str, Any]]


def count(backend: Backend, world: World, cases: str) -> list[Counted]:
    """Count setup and one step of every case."""
    return [_count(backend, world, case) for case in CASES[cases]]


def _count(backend: Backend, world: World, case: Case) -> Counted:
    counter = CommunicationCounter(world.layout)
    with counter.counting("setup"):
        engine, layout, model = prepare(backend, world, case)
    for step, batch in enumerate(list(global_batches())[: case.probed_step + 1]):
        take_step(engine, batch, world, case, counter if step == case.probed_step else None)
    counted = Counted(layout=layout, model=model, effective=engine.effective(), rows=counter.rows())
    engine.close()
    return counted


def count_twice(backend: Backend, world: World) -> tuple[dict[str, int], dict[str, int]]:
    """Payload by collective over setup and three steps: by the counter, and by the flight recorder."""
    before, counter, case = len(_recorded()), CommunicationCounter(), CASES["counted"][1]
    with counter.counting("all"):
        engine, *_ = prepare(backend, world, case)
        for batch in list(global_batches())[:3]:
            take_step(engine, batch, world, case)
    ours, theirs = Counter[str](), Counter[str]()
    for row in counter.rows():
        if row["op"] != "barrier":
            ours[row["op"]] += row["payload_bytes"]
    for entry in _recorded()[before:]:
        op = entry["profiling_name"].partition(":")[2]
        if "barrier" not in op:
            theirs[op] += _payload(entry)
    engine.close()
    return ours, theirs


def _recorded() -> list[dict[str, Any]]:
    from torch._C import _distributed_c10d

    return pickle.loads(_distributed_c10d._dump_fr_trace()).get("entries", [])


WIDTHS = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1}


def _payload(entry: dict[str, Any]) -> int:
    """The larger side of a collective: what goes in, or what comes out."""
    return max(
        sum(prod(size) * WIDTHS[dtype] for size, dtype in zip(sizes, dtypes, strict=True))
        for sizes, dtypes in (
            (entry["input_sizes"], entry["input_dtypes"]),
            (entry["output_sizes"], entry["output_dtypes"]),
        )
    )


STEPS_BEFORE = 2
"""From the second step on optimizers have their states; DeepSpeed's timer leaves out the first two."""


@dataclass
class Held:
    """What one rank of one case held."""

    kinds: dict[str, int]
    layout: Layout
    shard_size: int | None


def hold(backend: Backend, world: World, cases: str) -> list[Held | None]:
    """After a backward pass; None where the library cannot run a case."""
    return [_hold(backend, world, case) for case in CASES[cases]]


def _hold(backend: Backend, world: World, case: Case) -> Held | None:
    try:
        engine, layout, _ = prepare(backend, world, case)
    except Unsupported:
        return None
    batches = list(global_batches())
    for batch in batches[:STEPS_BEFORE]:
        take_step(engine, batch, world, case)
    run_micro_steps(engine, batches[STEPS_BEFORE], world, case)
    kinds = held_kinds(engine)
    shard_size = engine.effective().details.get("shard_size")
    engine.close()
    return Held(kinds, layout, shard_size)


def held_kinds(engine: Engine) -> dict[str, int]:
    """Live bytes by kind, with those that the library's own code holds."""
    inside = live_bytes_by_kind(engine.state_tensors(), AllocatorProbe()).inside
    assert inside is not None
    return dict(Counter(inside) + Counter(engine.hidden_bytes()))


Loaded = tuple[str | None, dict[str, str], Layout, ModelPart]
LOADINGS: tuple[AskedLoading, ...] = ("full", "slices")


def load(backend: Backend, world: World, cases: str) -> list[list[Loaded]]:
    """For each case and loading: what the engine says of it, a digest by parameter, and the bare model."""
    return [[_load(backend, world, case, loading) for loading in LOADINGS] for case in CASES[cases]]


def _load(backend: Backend, world: World, case: Case, loading: AskedLoading) -> Loaded:
    engine, layout, model = prepare(backend, world, case, loading)
    digests = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in engine.full_parameters()
    }
    said = engine.effective().loading
    engine.close()
    return said, digests, layout, model


def resume(backend: Backend, world: World) -> float:
    """Largest weight difference between training on, and training on from a checkpoint."""
    case, batches, folder = Case(), list(global_batches()), Path(os.environ[FOLDER]) / "checkpoint"
    first, *_ = prepare(backend, world, case, "full")
    for batch in batches[:2]:
        take_step(first, batch, world, case)
    first.save(folder)
    take_step(first, batches[2], world, case)
    expected = dict(first.full_parameters())
    first.close()
    second, *_ = prepare(backend, world, case, "full")
    second.load(folder)
    take_step(second, batches[2], world, case)
    restored = dict(second.full_parameters())
    second.close()
    return max(float((expected[name] - restored[name]).abs().max()) for name in expected)


def evaluate(backend: Backend, world: World) -> float:
    """Largest difference that a forward pass without gradient makes to the full master weights."""
    case, (tokens, labels) = Case(1, "bf16-mixed"), next(global_batches())
    engine, *_ = prepare(backend, world, case, "full")
    take_step(engine, (tokens, labels), world, case)
    before = dict(engine.full_parameters())
    with torch.no_grad():
        engine.forward({"tokens": tokens, "labels": labels})
    after = dict(engine.full_parameters())
    engine.close()
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def device_waits(backend: Backend, world: World) -> list[tuple[int, bool]]:
    """How often DeepSpeed asks its accelerator to wait for the device in an ordinary step of two micro-steps,
    and whether the engine says that its timer waits; like for like, then by the library's defaults."""
    presets = ("like-for-like", "library-defaults")
    return [_waits(backend, world, Case(2, "fp32", preset, family="gpt2")) for preset in presets]


def _waits(backend: Backend, world: World, case: Case) -> tuple[int, bool]:
    engine, *_ = prepare(backend, world, case)
    batches = list(global_batches())
    for batch in batches[:STEPS_BEFORE]:
        take_step(engine, batch, world, case)
    with _counting() as calls:
        take_step(engine, batches[STEPS_BEFORE], world, case)
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
