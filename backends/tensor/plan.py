"""Which dimension of which parameter DTensor and DeepSpeed's AutoTP cut, by the names of Llama-like models.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Linear layers whose outputs are cut: rows of their weights."""
ROWS = ("o_proj", "down_proj")
"""Linear layers whose inputs are cut: columns of their weights."""
VOCABULARY = ("embed_tokens", "lm_head")
"""Cut by tokens, where their number divides; else every rank holds them whole."""
HEADS = ("num_attention_heads", "num_key_value_heads")
"""Settings of a model whose numbers must divide."""


def cut_dimension(name: str, shape: Sequence[int], ranks: int) -> int | None:
    """The dimension of a parameter that is cut over `ranks`; None: every rank holds all of it."""
    module, _, kind = name.rpartition(".")
    layer = module.rpartition(".")[2]
    if layer in COLUMNS:
        return 0
    if layer in ROWS:
        return 1 if kind == "weight" else None
    if layer in VOCABULARY and shape[0] % ranks == 0:
        return 0
    return None


def local_shape(name: str, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The shape of what one rank holds."""
    cut = cut_dimension(name, shape, ranks)
    return tuple(size // ranks if dimension == cut else size for dimension, size in enumerate(shape))


def why_not_cut(shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any], ranks: int) -> str | None:
    """Why a model of these parameters cannot be cut over `ranks`; None: it can, as far as names tell."""
    layers = {name.rpartition(".")[0].rpartition(".")[2] for name in shapes}
    if not layers & set(COLUMNS):
        return f"it has none of the layers {', '.join(COLUMNS)}; tensor parallelism has no plan for it"
    for setting in HEADS:
        heads = config.get(setting)
        if heads is not None and heads % ranks:
            return f"{setting} {heads} does not divide among {ranks} tensor-parallel ranks"
    for name, shape in shapes.items():
        cut = cut_dimension(name, shape, ranks)
        if cut is not None and shape[cut] % ranks:
            return f"{name} of shape {list(shape)} cannot be cut over {ranks} ranks evenly"
    return None


OUTPUT = "lm_head"
"""Cut by tokens if it is not tied to the embedding; the embedding never is."""


def autotp_cut_dimension(name: str) -> int | None:
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


def autotp_local_shape(name: str, shape: Sequence[int], ranks: int, place: int) -> tuple[int, ...]:
    """The shape of what one rank holds, the `place`-th of those that cut its layers."""
    cut = autotp_cut_dimension(name)
    return tuple(
        part_sizes(size, ranks)[place] if dimension == cut else size for dimension, size in enumerate(shape)
    )
