"""On real ranks: what an engine communicates, loads, evaluates and waits for, and what it holds."""

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import torch

from harness.backends.base import Backend, Engine, World
from harness.backends.model_source import AskedLoading
from harness.backends.presets import TIMER_WAITS
from harness.forms.layout import Layout
from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.memory import AllocatorProbe, live_bytes_by_kind
from harness.record import ModelPart
from tests.contract.cases import Case, global_batches, prepare, take_step

LOADED = [
    Case(1, precision, tied=family != "llama", family=family)
    for precision, family in product(("fp32", "bf16-mixed"), ("llama", "gpt2"))
]
"""The widths of the second family divide by no number of ranks."""


def count_twice(backend: Backend, world: World) -> tuple[dict[str, int], dict[str, int]]:
    """Payload by collective over setup and three steps: by the counter, and by the flight recorder."""
    before, counter, case = len(_recorded()), CommunicationCounter(), Case(2, "bf16-mixed", tied=False)
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


def held_kinds(engine: Engine) -> dict[str, int]:
    """Live bytes by kind, with those that the library's own code holds."""
    inside = live_bytes_by_kind(engine.state_tensors(), AllocatorProbe()).inside
    assert inside is not None
    return dict(Counter(inside) + Counter(engine.hidden_bytes()))


Loaded = tuple[str | None, dict[str, str], Layout, ModelPart]
LOADINGS: tuple[AskedLoading, ...] = ("full", "slices")


def load(backend: Backend, world: World, *cases: Case) -> list[list[Loaded]]:
    """For each case and loading: what the engine says of it, a digest by parameter, and the bare model."""
    return [[_load(backend, world, case, loading) for loading in LOADINGS] for case in cases]


def _load(backend: Backend, world: World, case: Case, loading: AskedLoading) -> Loaded:
    engine, layout, model = prepare(backend, world, case, loading)
    digests = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in engine.full_parameters()
    }
    said = engine.effective().loading
    engine.close()
    return said, digests, layout, model


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


STEPS_BEFORE = 2
"""DeepSpeed's timer leaves out so many."""


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
