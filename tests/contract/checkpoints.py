"""On real ranks: what a checkpoint restores, and what full weights are after an evaluation."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.backends.base import Backend, Engine, SetupContext, World
from harness.job.job import UpdateGroup
from harness.rank.data import DataFacts
from harness.rank.models.model import build_model, model_config
from harness.rank.models.optimizer import build_optimizer, update_groups
from tests.contract.cases import (
    GLOBAL_BATCH,
    LEARNING_RATE,
    VOCABULARY,
    Case,
    compute_loss,
    contract_job,
    global_batches,
)


def resumed_difference(backend: Backend, world: World, folder: Path) -> float:
    """Largest weight difference between training on, and training on from a checkpoint."""
    first = _engine(backend, world, "fp32")
    batches = list(global_batches())
    for batch in batches[:2]:
        _step(first, batch, world)
    first.save(folder)
    _step(first, batches[2], world)
    expected = dict(first.full_parameters())
    first.close()
    second = _engine(backend, world, "fp32")
    second.load(folder)
    _step(second, batches[2], world)
    restored = dict(second.full_parameters())
    second.close()
    return max(float((expected[name] - restored[name]).abs().max()) for name in expected)


def evaluation_difference(backend: Backend, world: World) -> float:
    """Largest difference that a forward pass without gradient makes to the full master weights."""
    engine = _engine(backend, world, "bf16-mixed")
    tokens, labels = next(global_batches())
    _step(engine, (tokens, labels), world)
    before = dict(engine.full_parameters())
    with torch.no_grad():
        engine.forward({"tokens": tokens, "labels": labels})
    after = dict(engine.full_parameters())
    engine.close()
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def _engine(backend: Backend, world: World, precision: str) -> Engine:
    job = contract_job(Case(accumulation_steps=1, clipping=None, tied=True))
    context = SetupContext(
        world=world,
        precision=precision,
        gradient_clipping=None,
        micro_batch_size=GLOBAL_BATCH // world.data_size,
        accumulation_steps=1,
        preset="like-for-like",
        compute_loss=compute_loss(world),
    )
    updated: list[tuple[UpdateGroup, ...]] = []

    def build() -> torch.nn.Module:
        model = build_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))
        updated.append(update_groups(model, job.optimizer))
        return model

    engine = backend.prepare(build, lambda named: build_optimizer(named, job.optimizer, updated[-1]), context)
    engine.train(True)
    return engine


def _step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor], world: World) -> None:
    size = GLOBAL_BATCH // world.data_size
    part = slice(world.data_rank * size, (world.data_rank + 1) * size)
    loss = engine.forward({"tokens": batch[0][part], "labels": batch[1][part]})
    engine.backward(loss / 100, last_micro_step=True)
    engine.step(LEARNING_RATE)
