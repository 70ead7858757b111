"""On real ranks: host memory while an engine is set up, next to what it then holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from harness.backends.base import Backend, SetupContext, World
from harness.backends.model_source import Loading, ModelSource
from harness.job.job import DataSection, Job, ModelSection, UpdateGroup
from harness.rank.models.losses import summed_cross_entropy
from harness.rank.models.optimizer import build_optimizer, update_groups
from harness.rank.probes.memory import AllocatorProbe, HostPeak, live_bytes_by_kind
from harness.rank.probes.weights import digest_weights
from harness.rank.process.environment import return_freed_memory
from tests.contract.sources import job_source

VOCABULARY = 512
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCABULARY,
}  # fmt: skip
"""52 million parameters, nearly all of them in blocks of 3.2 million."""

EMBEDDING = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2**17, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class SetupMemory:
    """Of one rank, in bytes."""

    added_peak: int
    """Above what the process had before."""
    loading_peak: int
    """The same until the weights were built, or filled into the parts that are kept."""
    held: int
    """Weights, masters, gradients and optimizer states of the engine."""
    digest_peak: int
    """Most while the weights were digested, above what the engine held."""
    block: int
    parameters: int


def of_slices(backend: Backend, world: World) -> SetupMemory:
    return _measure(backend, world, "slices")


def of_a_large_embedding(backend: Backend, world: World) -> SetupMemory:
    """`block` is the embedding: 134 MB of 145."""
    return _measure(backend, world, "slices", EMBEDDING, vocabulary=2**17, unit="embed_tokens")


def of_whole_model(backend: Backend, world: World) -> SetupMemory:
    return _measure(backend, world, "full")


def of_broadcast(backend: Backend, world: World) -> SetupMemory:
    return _measure(backend, world, "broadcast")


def of_a_large_embedding_whole(backend: Backend, world: World) -> SetupMemory:
    return _measure(backend, world, "full", EMBEDDING, vocabulary=2**17, unit="embed_tokens")


def setup_job(config: dict[str, Any]) -> Job:
    return Job(model=ModelSection(config=config), data=DataSection(sequence_length=32))


def _noting(source: ModelSource, note: Callable[[], None]) -> ModelSource:
    """The same source, which notes when weights are there."""

    class Noting(type(source)):  # type: ignore[misc]
        def __call__(self) -> nn.Module:
            model = super().__call__()
            note()
            return model

        def filled(self) -> None:
            super().filled()
            note()

    source.__class__ = Noting
    return source


def _measure(
    backend: Backend,
    world: World,
    loading: Loading,
    config: dict[str, Any] = CONFIG,
    vocabulary: int = VOCABULARY,
    unit: str = ".layers.0.",
) -> SetupMemory:
    return_freed_memory()
    job = setup_job(config)
    updated: list[tuple[UpdateGroup, ...]] = []
    sizes: dict[str, int] = {}

    def note(model) -> None:
        updated.append(update_groups(model, job.optimizer))
        sizes.update((name, 4 * parameter.numel()) for name, parameter in model.named_parameters())

    context = SetupContext(
        world=world, precision="fp32", gradient_clipping=None, micro_batch_size=2, accumulation_steps=1,
        preset="like-for-like", compute_loss=summed_cross_entropy,
    )  # fmt: skip
    loaded: list[int] = []
    with HostPeak() as watched:

        def note_peak() -> None:
            watched.note()
            loaded.append(watched.peak_bytes or 0)

        source = _noting(job_source(job, vocabulary, world, note, loading), note_peak)
        engine = backend.prepare(
            source, lambda named: build_optimizer(named, job.optimizer, updated[-1]), context
        )
    live = live_bytes_by_kind(engine.state_tensors(), AllocatorProbe()).inside or {}
    with HostPeak() as digesting:
        digest_weights(engine)
    assert watched.before_bytes is not None
    assert watched.peak_bytes is not None
    assert digesting.before_bytes is not None
    assert digesting.peak_bytes is not None
    return SetupMemory(
        added_peak=watched.peak_bytes - watched.before_bytes,
        loading_peak=max(loaded) - watched.before_bytes,
        held=sum(live.values()),
        digest_peak=digesting.peak_bytes - digesting.before_bytes,
        block=sum(size for name, size in sizes.items() if unit in name),
        parameters=sum(sizes.values()),
    )
