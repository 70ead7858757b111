"""On real ranks: what each case communicates, counted by the harness's counter and by torch's recorder."""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from backends.base import Backend, Engine, SetupContext, World
from harness.worker.communication import CommunicationCounter
from harness.worker.model import build_model, describe_layout, model_config, summed_cross_entropy
from harness.worker.optimizer import build_adamw, decaying_names
from tests.contract.cases import (
    GLOBAL_BATCH,
    LEARNING_RATE,
    VOCABULARY,
    Case,
    contract_job,
    global_batches,
)

COUNTED_STEP = 3


@dataclass(frozen=True)
class VolumeCase:
    """One setting whose payload must be as expected."""

    accumulation_steps: int
    precision: str
    preset: str
    tied: bool
    clipping: float | None


VOLUME_CASES = (
    VolumeCase(1, "fp32", "like-for-like", tied=True, clipping=1.0),
    VolumeCase(2, "bf16-mixed", "like-for-like", tied=False, clipping=None),
    VolumeCase(2, "bf16-mixed", "library-defaults", tied=True, clipping=1.0),
)


@dataclass
class Counted:
    """What one rank of one case left behind."""

    layout: dict[str, Any]
    effective: dict[str, Any]
    rows: list[dict[str, Any]]


def count_cases(backend: Backend, world: World) -> list[Counted]:
    """Count setup and one step of every case."""
    return [_count(backend, world, case) for case in VOLUME_CASES]


def count_twice(backend: Backend, world: World) -> tuple[dict[str, int], dict[str, int]]:
    """Payload by collective over setup and three steps: by the counter, and by the flight recorder."""
    before = len(_recorded())
    counter = CommunicationCounter()
    with counter.counting("all"):
        engine, _ = _prepare(backend, world, VOLUME_CASES[1])
        for batch in list(global_batches())[:3]:
            _step(engine, batch, world, VOLUME_CASES[1], None)
    ours: dict[str, int] = {}
    for row in counter.rows():
        if row["op"] != "barrier":
            ours[row["op"]] = ours.get(row["op"], 0) + row["payload_bytes"]
    theirs: dict[str, int] = {}
    for entry in _recorded()[before:]:
        op = entry["profiling_name"].partition(":")[2]
        if "barrier" not in op:
            theirs[op] = theirs.get(op, 0) + _payload(entry)
    engine.close()
    return ours, theirs


def _count(backend: Backend, world: World, case: VolumeCase) -> Counted:
    counter = CommunicationCounter()
    with counter.counting("setup"):
        engine, layout = _prepare(backend, world, case)
    for step, batch in enumerate(list(global_batches())[: COUNTED_STEP + 1]):
        _step(engine, batch, world, case, counter if step == COUNTED_STEP else None)
    counted = Counted(layout=layout, effective=asdict(engine.effective()), rows=counter.rows())
    engine.close()
    return counted


def _prepare(backend: Backend, world: World, case: VolumeCase) -> tuple[Engine, dict[str, Any]]:
    job = contract_job(Case(case.accumulation_steps, case.clipping, case.tied))
    job = job.model_copy(update={"training": job.training.model_copy(update={"precision": case.precision})})
    described: list[dict[str, Any]] = []
    decaying: list[frozenset[str]] = []

    def build() -> torch.nn.Module:
        model = build_model(job, model_config(job, VOCABULARY))
        decaying.append(decaying_names(model, job.optimizer))
        described.append(describe_layout(model, decaying[-1]))
        return model

    context = SetupContext(
        world=world,
        precision=case.precision,  # type: ignore[arg-type]
        gradient_clipping=case.clipping,
        micro_batch_size=GLOBAL_BATCH // world.world_size // case.accumulation_steps,
        accumulation_steps=case.accumulation_steps,
        preset=case.preset,  # type: ignore[arg-type]
        compute_loss=summed_cross_entropy,
    )
    engine = backend.prepare(build, lambda named: build_adamw(named, job.optimizer, decaying[-1]), context)
    engine.train(True)
    return engine, described[-1]


def _step(
    engine: Engine,
    batch: tuple[torch.Tensor, torch.Tensor],
    world: World,
    case: VolumeCase,
    counter: CommunicationCounter | None,
) -> None:
    if counter:
        counter.start()
    micro = GLOBAL_BATCH // world.world_size // case.accumulation_steps
    for micro_step in range(case.accumulation_steps):
        first = (micro_step * world.world_size + world.rank) * micro
        part = slice(first, first + micro)
        if counter:
            counter.phase = "forward"
        loss = engine.forward({"tokens": batch[0][part], "labels": batch[1][part]})
        if counter:
            counter.phase = "backward"
        engine.backward(loss / 100, last_micro_step=micro_step == case.accumulation_steps - 1)
    if counter:
        counter.phase = "step"
    engine.step(LEARNING_RATE)
    if counter:
        counter.stop()


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
