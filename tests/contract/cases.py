"""Small jobs of the engine contract, and steps of them on one rank without the harness's own loop."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from harness.backends.base import Backend, Engine, SetupContext, World
from harness.backends.model_source import AskedLoading
from harness.forms.layout import Layout
from harness.job.job import Job, UpdateGroup
from harness.rank.data import IGNORED, DataFacts
from harness.rank.initial_weights import JobModelSource
from harness.rank.models.description import Built
from harness.rank.models.losses import ComputeLoss, loss_of_part, summed_cross_entropy
from harness.rank.models.model import model_config
from harness.rank.models.optimizer import build_optimizer, frozen_names, update_groups
from harness.rank.probes.communication import CommunicationCounter
from harness.record import ModelPart

STEPS = 6
PROBED_STEP = 3
GLOBAL_BATCH = 8
LENGTH = 24
VOCABULARY = 64
LEARNING_RATE = 1e-3
FOLDER = "CONTRACT_FOLDER"
"""Variable that names a folder which the ranks share."""
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": {"model_type": "gpt2", "n_embd": 33, "n_layer": 2, "n_head": 3, "n_positions": LENGTH},
    "wide": {"model_type": "llama", **SMALL, "hidden_size": 128, "intermediate_size": 384},
}
_folders = count()


@dataclass(frozen=True)
class Case:
    """One setting of a job."""

    accumulation_steps: int = 1
    precision: str = "fp32"
    preset: str = "like-for-like"
    _: KW_ONLY
    clipping: float | None = None
    tied: bool = True
    """Of a Llama."""
    family: str = "llama"
    activation_checkpointing: bool = False
    probed_step: int = PROBED_STEP

    @property
    def name(self) -> str:
        clipped = "clipped" if self.clipping else "unclipped"
        return f"accumulation {self.accumulation_steps}, {clipped}, {'tied' if self.tied else 'untied'}"


def contract_job(case: Case) -> Job:
    """A tiny language model."""
    config = {**FAMILIES[case.family], "vocab_size": VOCABULARY}
    if case.family == "llama":
        config["tie_word_embeddings"] = case.tied
    training = {"precision": case.precision, "activation_checkpointing": case.activation_checkpointing}
    job = Job.model_validate({"model": {"config": config}, "data": {"sequence_length": LENGTH}})
    return job.model_copy(update={"training": job.training.model_copy(update=training)})


def global_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Those of each step."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield noisy_chain(generator, VOCABULARY, LENGTH)


def noisy_chain(
    generator: torch.Generator, vocabulary: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of one step; every sample has another number of target tokens."""
    # A noisy chain can be learned; random tokens would give a flat loss that hides errors.
    tokens = torch.randint(0, vocabulary, (GLOBAL_BATCH, length), generator=generator)
    for position in range(1, length):
        tokens[:, position] = (tokens[:, position - 1] * 3 + 7) % vocabulary
    labels = tokens.clone()
    for sample in range(GLOBAL_BATCH):
        labels[sample, 4 + length // 12 * sample :] = IGNORED
    return tokens, labels


def compute_loss(world: World) -> ComputeLoss:
    """The loss of a batch, or where ranks divide samples that of the rank's part."""
    return loss_of_part(world) if world.mesh.size("sequence") > 1 else summed_cross_entropy


def shared_folder(purpose: str) -> Path:
    """A new one for ranks that call this in the same order."""
    return Path(os.environ[FOLDER]) / f"{purpose}-{next(_folders)}"


def job_source(
    job: Job,
    vocabulary_size: int,
    world: World,
    on_built: Callable[[nn.Module], None],
    loading: AskedLoading = "slices",
) -> JobModelSource:
    """What the harness hands to a backend: strategies that shard weights read theirs from a file."""
    config = model_config(job, DataFacts(vocabulary_size=vocabulary_size))
    folder = shared_folder("weights")
    return JobModelSource(job, config, world, loading=loading, folder=folder, on_built=on_built)


def engine_of(
    backend: Backend,
    world: World,
    job: Job,
    source: Callable[[Callable[[nn.Module], None]], Callable[[], nn.Module]],
    *,
    built: Callable[[nn.Module, Sequence[UpdateGroup]], object] = lambda model, updated: None,
    **given: Any,
) -> Engine:
    """An engine that has not trained.

    `source`: what the backend gets, of a function that it calls with the bare model; `built` hears of it too.
    `given`: other values of the context than those of one micro-step without clipping.
    """
    names: list[tuple[tuple[UpdateGroup, ...], frozenset[str]]] = []

    def note(model: nn.Module) -> None:
        names.append((update_groups(model, job.optimizer), frozen_names(model)))
        built(model, names[-1][0])

    steps = given.setdefault("accumulation_steps", 1)
    context: dict[str, Any] = {
        "world": world, "precision": job.training.precision, "gradient_clipping": None,
        "preset": "like-for-like",
        "micro_batch_size": GLOBAL_BATCH // world.data_size // steps, "compute_loss": summed_cross_entropy,
    }  # fmt: skip
    engine = backend.prepare(
        source(note), lambda named: build_optimizer(named, job.optimizer, *names[-1]),
        SetupContext(**(context | given)),
    )  # fmt: skip
    engine.train(True)
    return engine


def prepare(
    backend: Backend, world: World, case: Case, loading: AskedLoading = "slices"
) -> tuple[Engine, Layout, ModelPart]:
    """An engine, and layout and facts of its bare model."""
    job, built = contract_job(case), Built()
    engine = engine_of(
        backend, world, job, lambda note: job_source(job, VOCABULARY, world, note, loading),
        built=built.describe, gradient_clipping=case.clipping, preset=case.preset,
        accumulation_steps=case.accumulation_steps, compute_loss=compute_loss(world),
    )  # fmt: skip
    assert built.layout is not None
    assert built.model is not None
    return engine, built.layout, built.model


def take_step(
    engine: Engine,
    batch: tuple[torch.Tensor, torch.Tensor],
    world: World,
    case: Case,
    counter: CommunicationCounter | None = None,
) -> tuple[float, float]:
    """This rank's part of the loss, and the norm of the gradient."""
    if counter:
        counter.start()
    loss = run_micro_steps(engine, batch, world, case, counter)
    if counter:
        counter.phase = "step"
    norm = engine.step(LEARNING_RATE)
    if counter:
        counter.stop()
    return loss, norm


def run_micro_steps(
    engine: Engine,
    batch: tuple[torch.Tensor, torch.Tensor],
    world: World,
    case: Case,
    counter: CommunicationCounter | None = None,
) -> float:
    """Forward and backward passes of one step, up to its update: this rank's part of the mean loss per target
    token of the global batch."""
    (tokens, labels), counting = batch, counter or SimpleNamespace()
    targets = int((labels[:, 1:] != IGNORED).sum())
    micro, total = GLOBAL_BATCH // world.data_size // case.accumulation_steps, 0.0
    for micro_step in range(case.accumulation_steps):
        first = (micro_step * world.data_size + world.data_rank) * micro
        part = slice(first, first + micro)
        counting.phase = "forward"
        loss = engine.forward({"tokens": tokens[part], "labels": labels[part]})
        counting.phase = "backward"
        last = micro_step == case.accumulation_steps - 1
        engine.backward(loss * (world.data_size / targets), last_micro_step=last)
        total += float(loss.detach()) / targets
    return total
