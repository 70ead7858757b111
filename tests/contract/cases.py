"""The cases of the engine contract, and training them on one rank without the harness's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from harness.backends.base import Backend, Engine, SetupContext, World
from harness.job.job import Job, UpdateGroup
from harness.rank.data import IGNORED
from harness.rank.models.losses import ComputeLoss, loss_of_part, summed_cross_entropy
from harness.rank.models.optimizer import build_optimizer, update_groups
from tests.contract.sources import job_source

STEPS = 6
GLOBAL_BATCH = 8
LENGTH = 24
VOCABULARY = 64
LEARNING_RATE = 1e-3
ACTIVE_CLIPPING = 0.5
"""Below every gradient norm of these cases, so that clipping acts at each step."""


@dataclass(frozen=True)
class Case:
    """One setting in which an engine must equal the reference."""

    accumulation_steps: int
    clipping: float | None
    tied: bool

    @property
    def name(self) -> str:
        clipped = "clipped" if self.clipping else "unclipped"
        return f"accumulation {self.accumulation_steps}, {clipped}, {'tied' if self.tied else 'untied'}"


CASES = [Case(*values) for values in product((1, 2), (None, ACTIVE_CLIPPING), (True, False))]
HARDEST = CASES[-2:]
"""Accumulated and clipped, tied and not: for engines whose parts have all cases under another label."""


@dataclass
class Trace:
    """What one training left behind."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def contract_job(case: Case) -> Job:
    """A tiny Llama, tied or not."""
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": case.tied,
    }
    return Job.model_validate({"model": {"config": config}, "data": {"sequence_length": LENGTH}})


def global_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each step; every sample has another number of target tokens."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        # A noisy chain can be learned; random tokens would give a flat loss that hides errors.
        tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH), generator=generator)
        for position in range(1, LENGTH):
            tokens[:, position] = (tokens[:, position - 1] * 3 + 7) % VOCABULARY
        labels = tokens.clone()
        for sample in range(GLOBAL_BATCH):
            labels[sample, 4 + 2 * sample :] = IGNORED
        yield tokens, labels


def compute_loss(world: World) -> ComputeLoss:
    """The loss of a batch, or where ranks divide samples that of the rank's part."""
    return loss_of_part(world) if world.mesh.size("sequence") > 1 else summed_cross_entropy


def train(backend: Backend, case: Case, world: World) -> Trace:
    """Train one case; losses are this rank's share of the mean per target token of the global batch."""
    micro = GLOBAL_BATCH // world.data_size // case.accumulation_steps
    context = SetupContext(
        world=world,
        precision="fp32",
        gradient_clipping=case.clipping,
        micro_batch_size=micro,
        accumulation_steps=case.accumulation_steps,
        preset="like-for-like",
        compute_loss=compute_loss(world),
    )
    job = contract_job(case)
    updated: list[tuple[UpdateGroup, ...]] = []

    def note(model: torch.nn.Module) -> None:
        updated.append(update_groups(model, job.optimizer))

    source = job_source(job, VOCABULARY, world, note)
    engine = backend.prepare(
        source, lambda named: build_optimizer(named, job.optimizer, updated[-1]), context
    )
    engine.train(True)
    trace = _train(engine, case, world, micro)
    engine.close()
    return trace


def _train(engine: Engine, case: Case, world: World, micro: int) -> Trace:
    losses, norms = [], []
    for tokens, labels in global_batches():
        targets = int((labels[:, 1:] != IGNORED).sum())
        share = 0.0
        for step in range(case.accumulation_steps):
            first = (step * world.data_size + world.data_rank) * micro
            part = slice(first, first + micro)
            loss = engine.forward({"tokens": tokens[part], "labels": labels[part]})
            engine.backward(
                loss * (world.data_size / targets),
                last_micro_step=step == case.accumulation_steps - 1,
            )
            share += float(loss.detach()) / targets
        losses.append(share)
        norms.append(engine.step(LEARNING_RATE))
    return Trace(losses=losses, norms=norms, weights=dict(engine.full_parameters()))
