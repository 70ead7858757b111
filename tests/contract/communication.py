"""On real ranks: what each case communicates, counted by the harness's counter and by torch's recorder."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from harness.backends.base import Backend, Effective, Engine, SetupContext, World
from harness.backends.model_source import Loading
from harness.job.job import Job, UpdateGroup
from harness.rank.models.description import Built
from harness.rank.models.optimizer import build_optimizer, update_groups
from harness.rank.probes.communication import CommunicationCounter
from harness.record import LayoutPart, ModelPart
from tests.contract.cases import (
    GLOBAL_BATCH,
    LEARNING_RATE,
    LENGTH,
    VOCABULARY,
    Case,
    compute_loss,
    contract_job,
    global_batches,
)
from tests.contract.sources import job_source

PROBED_STEP = 3


@dataclass(frozen=True)
class VolumeCase:
    """One setting whose payload must be as expected."""

    accumulation_steps: int
    precision: str
    preset: str
    tied: bool
    clipping: float | None
    family: str = "llama"
    activation_checkpointing: bool = False
    probed_step: int = PROBED_STEP


VOLUME_CASES = (
    VolumeCase(1, "fp32", "like-for-like", tied=True, clipping=1.0),
    VolumeCase(2, "bf16-mixed", "like-for-like", tied=False, clipping=None),
    VolumeCase(2, "bf16-mixed", "library-defaults", tied=True, clipping=1.0),
)


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 33, "n_layer": 2, "n_head": 3, "n_positions": LENGTH},
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "mistral": {"model_type": "mistral", **SMALL},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "wide": {"model_type": "llama", **SMALL, "hidden_size": 128, "intermediate_size": 384},
}
"""Other architectures than the contract's Llama."""


def _recomputed(accumulation_steps: int, precision: str, preset: str, family: str) -> VolumeCase:
    return VolumeCase(
        accumulation_steps, precision, preset, tied=family != "llama", clipping=None, family=family,
        activation_checkpointing=True,
    )  # fmt: skip


RECOMPUTED_CASES = (
    _recomputed(1, "fp32", "like-for-like", "llama"),
    _recomputed(2, "bf16-mixed", "like-for-like", "llama"),
    _recomputed(2, "fp32", "library-defaults", "llama"),
    *(_recomputed(1, "fp32", "like-for-like", family) for family in ("gpt2", "bloom", "mistral", "qwen2")),
)


RECOMPUTED_FEW = RECOMPUTED_CASES[:4]
"""Of two architectures."""
FIRST_STEPS = tuple(
    VolumeCase(1, "bf16-mixed", "like-for-like", tied=True, clipping=1.0, probed_step=step) for step in (0, 1)
)


@dataclass
class Counted:
    """What one rank of one case left behind."""

    layout: LayoutPart
    model: ModelPart
    effective: Effective
    rows: list[dict[str, Any]]


def count_recomputed(backend: Backend, world: World) -> list[Counted]:
    """The same of jobs that recompute their activations."""
    return [_count(backend, world, case) for case in RECOMPUTED_CASES]


def count_recomputed_few(backend: Backend, world: World) -> list[Counted]:
    """The same of two architectures."""
    return [_count(backend, world, case) for case in RECOMPUTED_FEW]


def count_recomputed_llama(backend: Backend, world: World) -> list[Counted]:
    """The same of models whose attention ranks can divide."""
    return [_count(backend, world, case) for case in RECOMPUTED_CASES if case.family == "llama"]


def count_first_steps(backend: Backend, world: World) -> list[Counted]:
    """The same of a job's first steps."""
    return [_count(backend, world, case) for case in FIRST_STEPS]


def count_cases(backend: Backend, world: World) -> list[Counted]:
    """Count setup and one step of every case."""
    return [_count(backend, world, case) for case in VOLUME_CASES]


def count_twice(backend: Backend, world: World) -> tuple[dict[str, int], dict[str, int]]:
    """Payload by collective over setup and three steps: by the counter, and by the flight recorder."""
    before = len(_recorded())
    counter = CommunicationCounter()
    with counter.counting("all"):
        engine, _, _ = prepare(backend, world, VOLUME_CASES[1])
        for batch in list(global_batches())[:3]:
            take_step(engine, batch, world, VOLUME_CASES[1], None)
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
    counter = CommunicationCounter(world.layout)
    with counter.counting("setup"):
        engine, layout, model = prepare(backend, world, case)
    for step, batch in enumerate(list(global_batches())[: case.probed_step + 1]):
        take_step(engine, batch, world, case, counter if step == case.probed_step else None)
    counted = Counted(layout=layout, model=model, effective=engine.effective(), rows=counter.rows())
    engine.close()
    return counted


def prepare(
    backend: Backend, world: World, case: VolumeCase, loading: Loading = "slices"
) -> tuple[Engine, LayoutPart, ModelPart]:
    """An engine, and layout and facts of its bare model."""
    job = _job(case)
    built = Built()
    updated: list[tuple[UpdateGroup, ...]] = []

    def note(model: torch.nn.Module) -> None:
        updated.append(update_groups(model, job.optimizer))
        built.describe(model, updated[-1])

    source = job_source(job, VOCABULARY, world, note, loading)

    context = SetupContext(
        world=world,
        precision=case.precision,  # type: ignore[arg-type]
        gradient_clipping=case.clipping,
        micro_batch_size=GLOBAL_BATCH // world.data_size // case.accumulation_steps,
        accumulation_steps=case.accumulation_steps,
        preset=case.preset,  # type: ignore[arg-type]
        compute_loss=compute_loss(world),
    )
    engine = backend.prepare(
        source, lambda named: build_optimizer(named, job.optimizer, updated[-1]), context
    )
    engine.train(True)
    assert built.layout is not None
    assert built.model is not None
    return engine, built.layout, built.model


def _job(case: VolumeCase) -> Job:
    job = contract_job(Case(case.accumulation_steps, case.clipping, case.tied))
    changes = {"precision": case.precision, "activation_checkpointing": case.activation_checkpointing}
    job = job.model_copy(update={"training": job.training.model_copy(update=changes)})
    if case.family == "deep":
        deep = {**(job.model.config or {}), "num_hidden_layers": 4}
        return job.model_copy(update={"model": job.model.model_copy(update={"config": deep})})
    if case.family not in FAMILIES:
        return job
    config = {**FAMILIES[case.family], "vocab_size": VOCABULARY}
    return job.model_copy(update={"model": job.model.model_copy(update={"config": config})})


def take_step(
    engine: Engine,
    batch: tuple[torch.Tensor, torch.Tensor],
    world: World,
    case: VolumeCase,
    counter: CommunicationCounter | None,
) -> None:
    if counter:
        counter.start()
    run_micro_steps(engine, batch, world, case, counter)
    if counter:
        counter.phase = "step"
    engine.step(LEARNING_RATE)
    if counter:
        counter.stop()


def run_micro_steps(
    engine: Engine,
    batch: tuple[torch.Tensor, torch.Tensor],
    world: World,
    case: VolumeCase,
    counter: CommunicationCounter | None,
) -> None:
    """Forward and backward passes of one step, up to its update."""
    micro = GLOBAL_BATCH // world.data_size // case.accumulation_steps
    for micro_step in range(case.accumulation_steps):
        first = (micro_step * world.data_size + world.data_rank) * micro
        part = slice(first, first + micro)
        if counter:
            counter.phase = "forward"
        loss = engine.forward({"tokens": batch[0][part], "labels": batch[1][part]})
        if counter:
            counter.phase = "backward"
        engine.backward(loss / 100, last_micro_step=micro_step == case.accumulation_steps - 1)


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
