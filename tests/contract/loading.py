"""On real ranks: host memory while an engine is set up, next to what it then holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.base import Backend, World
from harness.backends.model_source import AskedLoading, ModelSource
from harness.backends.piece import Piece
from harness.backends.refusals import Unsupported
from harness.errors import HarnessError
from harness.job.job import DataSection, Job, ModelSection
from harness.rank.probes.memory import AllocatorProbe, HostPeak, live_bytes_by_kind
from harness.rank.probes.weights import digest_weights
from harness.rank.process.environment import return_freed_memory
from harness.record import WeightsPart
from tests.contract.cases import engine_of, job_source

BLOCKS = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512,
}  # fmt: skip
"""52 million parameters, nearly all of them in blocks of 3.2 million."""

EMBEDDING = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2**17, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": (BLOCKS, ".layers.0."), "embedding": (EMBEDDING, "embed_tokens"),
}  # fmt: skip
"""With part of the names of the largest unit: a block, or the embedding, which is 134 MB of 145."""


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


def measure_setup(
    backend: Backend, world: World, loading: AskedLoading, model: str = "blocks"
) -> SetupMemory:
    config, unit = MODELS[model]
    return_freed_memory()
    job = setup_job(config)
    sizes: dict[str, int] = {}

    def weigh(model: nn.Module, updated: object) -> None:
        sizes.update((name, 4 * parameter.numel()) for name, parameter in model.named_parameters())

    source = partial(job_source, job, config["vocab_size"], world, loading=loading)
    loaded: list[int] = []
    with HostPeak() as watched:

        def note_peak() -> None:
            watched.note()
            loaded.append(watched.peak_bytes or 0)

        engine = engine_of(
            backend, world, job, built=weigh, micro_batch_size=2, precision="fp32",
            source=lambda note: _noting(source(note), note_peak),
        )  # fmt: skip
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


NAMES = ("embed", "block.weight", "block.bias", "head")


def tensors(differing: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = {name: torch.randn(7 + 5 * n, 3, generator=generator) for n, name in enumerate(NAMES)}
    found["block.bias"][0, 0] += differing
    return found


def of_equal_ranks(backend: Backend, world: World) -> WeightsPart:
    return digest_weights(_holding(tensors()))


def of_a_rank_that_differs(backend: Backend, world: World) -> WeightsPart:
    """Rank 1 has another value in one tensor, whichever rank digests that."""
    return digest_weights(_holding(tensors(differing=0.5 if world.rank == 1 else 0.0)))


def _holding(held: dict[str, Tensor]) -> Any:
    def full_parameters() -> Iterator[tuple[str, Tensor]]:
        yield from held.items()

    def weight_pieces() -> Iterator[Piece]:
        raise Unsupported("not listed")

    return SimpleNamespace(
        full_parameters=full_parameters, weight_pieces=weight_pieces, weights_in_use=lambda: iter(())
    )


def of_shards(backend: Backend, world: World) -> WeightsPart:
    """Every rank lists a range of each tensor; ranges divide no row."""
    return digest_weights(_sharded(world, tensors()))


def of_missing_elements(backend: Backend, world: World) -> str:
    """The last rank lists too few of each tensor."""
    try:
        digest_weights(_sharded(world, tensors(), missing=1 if world.rank == world.world_size - 1 else 0))
    except HarnessError as error:
        return str(error)
    return "accepted"


def _sharded(world: World, held: dict[str, Tensor], missing: int = 0) -> Any:
    def weight_pieces() -> Iterator[Piece]:
        for name, tensor in held.items():
            part = -(-tensor.numel() // world.world_size)
            start = part * world.rank
            weight = tensor.view(-1)[start : start + part]
            weight = weight[: weight.numel() - missing]
            yield Piece(name=name, shape=tuple(tensor.shape), start=start, weight=weight, moments={})

    return SimpleNamespace(weight_pieces=weight_pieces, weights_in_use=lambda: iter(()))
