"""Which part of which parameter DeepSpeed's AutoTP gives to each rank, as transformers plans it for Llama.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.backends.tensor_plan import COLUMNS, ROWS

OUTPUT = "lm_head"
"""Cut by tokens if it is not tied to the embedding; the embedding never is."""


def cut_dimension(name: str) -> int | None:
    """The dimension of a parameter that is cut; None: every rank holds all of it.

    A tied output layer goes by the name of the embedding.
    """
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer in (*COLUMNS, OUTPUT):
        return 0
    return 1 if layer in ROWS and kind == "weight" else None


def part_sizes(size: int, ranks: int) -> list[int]:
    """How a dimension is divided: the first ranks have one more where it does not divide evenly.

    `get_shard_size` (module_inject/tp_shard.py, DeepSpeed 0.19.8) for a grain of 1. Heads must divide.
    """
    whole, more = divmod(size, ranks)
    return [whole + (place < more) for place in range(ranks)]


def local_shape(name: str, shape: Sequence[int], ranks: int, place: int) -> tuple[int, ...]:
    """The shape of what one rank holds, the `place`-th of those that cut its layers."""
    cut = cut_dimension(name)
    return tuple(
        part_sizes(size, ranks)[place] if dimension == cut else size for dimension, size in enumerate(shape)
    )
