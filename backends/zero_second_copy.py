"""The second copy of the weights that ZeRO-3 keeps in groups of ranks (ZeRO++ hpZ). DeepSpeed 0.19."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def forget_second_copies(model: nn.Module) -> None:
    """Have the first forward pass gather from all ranks, as later steps do.

    Partitioning makes the copy as it frees a weight (`Init._partition_param_sec`), also of one that was
    reserved without values or only shows its shape: the first step would gather that, not the weights.
    """
    for parameter in model.parameters():
        if second_copy(parameter) is not None:
            parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]


def second_copies(model: nn.Module) -> Iterator[Tensor]:
    """This rank's pieces of it, as far as they are there."""
    for parameter in model.parameters():
        copy = second_copy(parameter)
        if copy is not None:
            yield copy


def second_copy(parameter: nn.Parameter) -> Tensor | None:
    """This rank's piece of one parameter."""
    piece: Tensor | None = getattr(parameter, "ds_secondary_tensor", None)
    return piece


def forget_group() -> None:
    """Let the next engine of this process have groups of its own: DeepSpeed refuses to make them twice."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
