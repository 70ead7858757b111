"""Model states of FullyShardedDataParallel (FSDP1): every unit is one flat parameter."""

from __future__ import annotations

from dataclasses import dataclass

from harness.record import TensorPart
from harness.theory.memory.terms import (
    ADAM_MOMENTS,
    ModelStates,
    Setting,
    Share,
    buffer_terms,
    ceil_to,
    elements,
    numel,
    states,
    step_counters,
)

ALIGNMENT_BYTES = 16
"""torch 2.13, `distributed/fsdp/_flat_param.py`, `_get_aligned_numel`."""


@dataclass(frozen=True)
class FlatUnit:
    """One flat parameter: where each original one begins, and the whole length in elements."""

    offsets: tuple[int, ...]
    parameters: tuple[TensorPart, ...]
    length: int


def flat_unit(parameters: list[TensorPart], compute_bytes: int, ranks: int) -> FlatUnit:
    """Lay out a unit as `FlatParamHandle._init_flat_param_and_metadata` does with original parameters.

    Each parameter begins at a multiple of 16 bytes, counted in the dtype of the forward pass; the end is
    padded to a multiple of the ranks.
    """
    aligned = ALIGNMENT_BYTES // compute_bytes
    offsets, position = [], 0
    for parameter in parameters:
        position = ceil_to(position, aligned)
        offsets.append(position)
        position += numel(parameter)
    return FlatUnit(tuple(offsets), tuple(parameters), ceil_to(position, ranks))


def fsdp1_states(setting: Setting, *, sharded: bool) -> ModelStates:
    """Closed form per rank, from torch 2.13, `distributed/fsdp/_flat_param.py`.

    Weights and gradients: the rank's piece of each flat parameter, padding included. Adam's moments: the
    parts of original parameters that fall into the piece (`_get_shard_metadata`); a parameter without a
    part has no gradient, so no state and no step counter. At world size 1 sharding is off
    (`_init_utils.py`, `_init_core_state`).
    """
    width = setting.trained_bytes
    host = setting.offload == "cpu"
    pieces = setting.shards if sharded else 1
    ranks = setting.shards if sharded else setting.world_size
    held = own = present = 0
    for unit in setting.units():
        flat = flat_unit(unit, setting.compute_bytes, ranks)
        length = flat.length // pieces
        begin = length * (setting.shard_rank if sharded else 0)
        held += length
        for offset, parameter in zip(flat.offsets, flat.parameters, strict=True):
            part = min(offset + numel(parameter), begin + length) - max(offset, begin)
            if part > 0:
                own += part
                present += 1
    assert pieces > 1 or own == elements(setting.layout.parameters)
    piece = Share(own=own, padding=held - own, padding_name="alignment to 16 bytes and padding to the ranks")
    return states(
        [
            *piece.terms("weights", "own piece of each unit", width, host=host),
            *piece.terms("gradients", "own piece of each unit", width, host=host),
            *piece.unpadded().terms(
                "optimizer", "Adam's moments of own piece", ADAM_MOMENTS * width, host=host
            ),
            step_counters(present),
            *buffer_terms(setting),
        ]
    )
