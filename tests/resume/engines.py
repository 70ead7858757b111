"""Trains a tiny model under one backend from a given step on, without the harness's own loop."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from harness.backends import registry
from harness.backends.base import Engine, LossScale, World
from harness.backends.checkpoints.tensor_files import load_portable, save_portable
from harness.backends.piece import OptimizerProgress
from harness.job.job import Job
from harness.rank.data import DataFacts
from harness.rank.models.model import build_model, model_config
from harness.rank.models.optimizer import learning_rate
from tests.contract.cases import engine_of, noisy_chain, of_rank, step_of

STEPS = 6
SAVED_AT = 3
"""Steps taken when the checkpoint is saved."""
LENGTH = 16
VOCABULARY = 62
BACKENDS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp1")
WORLD_SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Trained:
    """Losses (the mean over target tokens, all ranks), norms and weights of a part of a training."""

    losses: list[float]
    norms: list[float]
    progress: OptimizerProgress
    """After the last step."""
    weights: dict[str, torch.Tensor]


def resume_job(*, tied: bool = False, precision: str = "fp32", **sections: Any) -> Job:
    """Shapes that neither 2 nor 4 divides, so that shards are uneven and padded; two weight-decay groups.

    `sections`: more of the job's.
    """
    config = {
        "hidden_size": 30, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 3, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    return Job.model_validate({
        "model": {"config": config}, "data": {"sequence_length": LENGTH}, **sections,
        "training": {
            "precision": precision, "steps": STEPS, "initial_loss_scale": 1024.0,
            "loss_scale_growth_interval": 2,
        },
    })  # fmt: skip


def make_engine(label: str, world: World, job: Job) -> Engine:
    """An engine that has not trained."""

    def build(note: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
        model = build_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))
        note(model)
        return model

    scale = LossScale(
        initial=job.training.initial_loss_scale, growth_interval=job.training.loss_scale_growth_interval
    )
    return engine_of(
        registry.create(label), world, job, lambda note: partial(build, note), gradient_clipping=0.5,
        loss_scale=scale,
    )  # fmt: skip


def train(engine: Engine, world: World, job: Job, first: int, last: int) -> Trained:
    """Steps `first` to `last`, the last one not among them."""
    losses, norms = [], []
    for step in range(first, last):
        parts, targets = of_rank(global_batch(step), world)
        rate = learning_rate(step, STEPS, job.optimizer, job.schedule)
        loss, norm = step_of(engine, parts, world.data_size / targets, rate)
        total = loss * world.mesh.counts_loss(world.rank)
        dist.all_reduce(total)
        losses.append(float(total) / targets)
        norms.append(norm)
    return Trained(
        losses=losses, norms=norms, weights=dict(engine.full_parameters()), progress=engine.progress()
    )


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return noisy_chain(torch.Generator().manual_seed(1000 + step), VOCABULARY, LENGTH)


LOST_SCALER = "harness.backends.torch_engine.restore_scaler"
"""What may be left out while a checkpoint is loaded."""


def save_and_train_on(label: str, world: World, job: Job, folder: Path, *, native: bool = True) -> Trained:
    """Save both formats, or the neutral one alone, after `SAVED_AT` steps; the rest of the training, not
    interrupted."""
    world = registry.placed(label, world)
    engine = make_engine(label, world, job)
    train(engine, world, job, 0, SAVED_AT)
    if native:
        engine.save(folder / "native")
    save_portable(engine, folder / "neutral", "neutral")
    rest = train(engine, world, job, SAVED_AT, STEPS)
    engine.close()
    return rest


def resume(
    label: str, world: World, job: Job, folder: Path, form: str, sabotage: str | None = None
) -> Trained:
    """The rest of the training, from a checkpoint, by an engine that has not trained."""
    world = registry.placed(label, world)
    engine = make_engine(label, world, job)
    with patch(sabotage) if sabotage else nullcontext():
        if form == "native":
            engine.load(folder / "native")
        else:
            load_portable(engine, folder / "neutral", "neutral")
    tokens, labels = global_batch(0)
    engine.rehearse({"tokens": tokens[:1], "labels": labels[:1]})
    rest = train(engine, world, job, SAVED_AT, STEPS)
    engine.close()
    return rest
