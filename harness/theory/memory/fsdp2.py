"""Model states of `fully_shard` (FSDP2): every parameter is split along its first dimension."""

from __future__ import annotations

from math import prod

from harness.record import TensorPart
from harness.theory.memory.terms import (
    ADAM_MOMENTS,
    ADAM_STEP_BYTES,
    ModelStates,
    Setting,
    Term,
    buffer_terms,
    numel,
    states,
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
    return states(
        [
            Term(kind="weights", name="own rows", bytes=own * width, host=host),
            Term(
                kind="weights",
                name="padding of the first dimension",
                bytes=(padded - own) * width,
                host=host,
                extra=True,
            ),
            Term(kind="gradients", name="own rows", bytes=own * width, host=host),
            Term(
                kind="gradients",
                name="padding of the first dimension",
                bytes=0 if host and setting.device != "cpu" else (padded - own) * width,
                host=host,
                extra=True,
            ),
            Term(
                kind="optimizer",
                name="Adam's moments of own rows",
                bytes=ADAM_MOMENTS * own * width,
                host=host,
            ),
            Term(
                kind="optimizer",
                name="Adam's step counters",
                bytes=ADAM_STEP_BYTES * len(setting.layout.parameters),
                host=True,
                extra=True,
            ),
            *buffer_terms(setting),
        ]
    )


def _rows(parameter: TensorPart) -> tuple[int, int]:
    """Rows along dim 0, and elements of one row."""
    if not parameter.shape:
        return 1, numel(parameter)
    return parameter.shape[0], prod(parameter.shape[1:])
