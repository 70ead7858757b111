"""On real ranks: a digest that they share."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from harness.backends.base import Backend, World
from harness.backends.piece import Piece
from harness.backends.refusals import Unsupported
from harness.errors import HarnessError
from harness.rank.probes.weights import digest_weights
from harness.record import WeightsPart

NAMES = ("embed", "block.weight", "block.bias", "head")


def tensors(differing: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = {name: torch.randn(7 + 5 * n, 3, generator=generator) for n, name in enumerate(NAMES)}
    found["block.bias"][0, 0] += differing
    return found


def of_equal_ranks(backend: Backend, world: World) -> WeightsPart:
    return digest_weights(_engine(tensors()))


def of_a_rank_that_differs(backend: Backend, world: World) -> WeightsPart:
    """Rank 1 has another value in one tensor, whichever rank digests that."""
    return digest_weights(_engine(tensors(differing=0.5 if world.rank == 1 else 0.0)))


def _engine(held: dict[str, Tensor]) -> Any:
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
