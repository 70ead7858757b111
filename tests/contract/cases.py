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

from harness.backends.base import Backend, Batch, Engine, SetupContext, World
from harness.backends.model_source import AskedLoading
from harness.forms.layout import Layout
from harness.job.job import Job, UpdateGroup
from harness.rank.data import IGNORED, DataFacts
from harness.rank.initial_weights import JobModelSource
from harness.rank.models.description import Built
from harness.rank.models.losses import summed_cross_entropy
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
    tied: bool = True
    """Of a Llama."""
    family: str = "llama"


def contract_job(case: Case) -> Job:
    """A tiny language model."""
    config = {**FAMILIES[case.family], "vocab_size": VOCABULARY}
    if case.family == "llama":
        config["tie_word_embeddings"] = case.tied
    training = {"precision": case.precision}
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
        built=built.describe, preset=case.preset, accumulation_steps=case.accumulation_steps,
    )  # fmt: skip
    assert built.layout is not None
    assert built.model is not None
    return engine, built.layout, built.model


def of_rank(
    batch: tuple[torch.Tensor, torch.Tensor], world: World, accumulation_steps: int = 1
) -> tuple[list[dict[str, torch.Tensor]], int]:
    """This rank's micro-batches of a global one, and how many target tokens all of it has."""
    tokens, labels = batch
    micro = GLOBAL_BATCH // world.data_size // accumulation_steps
    firsts = [(step * world.data_size + world.data_rank) * micro for step in range(accumulation_steps)]
    parts = [{"tokens": tokens[at : at + micro], "labels": labels[at : at + micro]} for at in firsts]
    return parts, int((labels[:, 1:] != IGNORED).sum())


def step_of(
    engine: Engine,
    micro_batches: Sequence[Batch],
    scale: float,
    learning_rate: float = LEARNING_RATE,
    counter: CommunicationCounter | None = None,
    before_update: Callable[[], object] = lambda: None,
) -> tuple[torch.Tensor, float]:
    """One step of losses that are multiplied by `scale`: their sum without, and the norm of the gradient."""
    counting = counter or SimpleNamespace(start=lambda: None, stop=lambda: None)
    losses = []
    counting.start()
    for number, batch in enumerate(micro_batches, 1):
        counting.phase = "forward"
        loss = engine.forward(batch)
        counting.phase = "backward"
        engine.backward(loss * scale, last_micro_step=number == len(micro_batches))
        losses.append(loss.detach().double())
    before_update()
    counting.phase = "step"
    norm = engine.step(learning_rate)
    counting.stop()
    return torch.stack(losses).sum(), norm


def take_step(
    engine: Engine, batch: tuple[torch.Tensor, torch.Tensor], world: World, case: Case,
    counter: CommunicationCounter | None = None,
) -> None:  # fmt: skip
    """Of the mean loss per target token of the global batch."""
    parts, targets = of_rank(batch, world, case.accumulation_steps)
    step_of(engine, parts, world.data_size / targets, counter=counter)
