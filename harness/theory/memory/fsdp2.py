"""Model states of `fully_shard` (FSDP2): every parameter is split along its first dimension."""

from __future__ import annotations

from math import prod

from harness.record import TensorPart
from harness.theory.memory.terms import (
    ADAM_MOMENTS,
    ModelStates,
    Setting,
    Share,
    buffer_terms,
    numel,
    states,
    step_counters,
)


def fsdp2_states(setting: Setting) -> ModelStates:
    """Closed form per rank, from torch 2.13, `distributed/fsdp/_fully_shard`.

    Weights: `FSDPParam._init_sharded_param` cuts dim 0 with `torch.chunk` and pads every rank's piece to
    the first: ceil(rows / N) rows. Gradients: `foreach_reduce` takes them from one reduce-scatter output
    per unit, padded alike, cast back to the weights' dtype; offloaded ones are copied without padding.
    Adam's moments are as large as the rank's own rows, so the last ranks may hold less.
    """
    width = setting.trained_bytes
    host = setting.offload == "cpu"
    own = padded = 0
    for parameter in setting.layout.parameters:
        rows, row = _rows(parameter)
        most = -(-rows // setting.shards)
        mine = max(0, min(rows - most * setting.shard_rank, most))
        own += mine * row
        padded += most * row
    held = Share(own=own, padding=padded - own, padding_name="padding of the first dimension")
    reduced = held.unpadded() if host and setting.device != "cpu" else held
    return states(
        [
            *held.terms("weights", "own rows", width, host=host),
            *reduced.terms("gradients", "own rows", width, host=host),
            *held.unpadded().terms(
                "optimizer", "Adam's moments of own rows", ADAM_MOMENTS * width, host=host
            ),
            step_counters(len(setting.layout.parameters)),
            *buffer_terms(setting),
        ]
    )


def _rows(parameter: TensorPart) -> tuple[int, int]:
    """Rows along dim 0, and elements of one row."""
    if not parameter.shape:
        return 1, numel(parameter)
    return parameter.shape[0], prod(parameter.shape[1:])
