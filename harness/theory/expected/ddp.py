"""DistributedDataParallel of torch 2.13, natively and through Accelerate."""

from __future__ import annotations

from collections.abc import Sequence

from harness.theory.expected.setting import (
    BUFFERS,
    DTYPE_BYTES,
    GRADIENTS,
    Collective,
    Setting,
    Tensor,
    Volume,
    over_steps,
)

BUCKET_BYTES = 25 * 2**20
"""`bucket_cap_mb` of DistributedDataParallel.__init__."""
FIRST_BUCKET_BYTES = 2**20
"""`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`, the smaller first bucket once they are rebuilt."""
BROADCAST_BUCKET_BYTES = 250 * 2**20
"""`broadcast_bucket_size` of DistributedDataParallel.__init__."""
REBUILT = "bucket order broadcast"


def ddp_volume(setting: Setting) -> Volume:
    """Gradients all-reduced once per step in the dtype of the weights, buffers broadcast before it.

    `torch/nn/parallel/distributed.py`: under `no_sync` neither gradients nor buffers cross the wire
    (`_pre_forward`, `_post_forward`, `will_sync_module_buffers`), so accumulation changes nothing.
    """
    return Volume(collectives=(*_setup(setting), *over_steps(setting, _step), *_evaluation(setting)))


def _setup(setting: Setting) -> list[Collective]:
    """Shapes are compared, then the state of rank 0 is broadcast.

    `_verify_param_shape_across_processes` gathers each rank's number of parameters (one int64) and
    broadcasts sizes and strides of them all (two int64 per dimension; `torch/csrc/distributed/c10d/
    reducer.cpp`, verify_params_across_processes); `_sync_module_states` broadcasts parameters and
    buffers, coalesced by dtype.
    """
    dimensions = sum(len(tensor.shape) for tensor in setting.parameters)
    found = [
        Collective(
            phase="setup",
            op="all_gather",
            dtype="int64",
            term="number of parameters compared",
            payload_bytes=8 * setting.world_size,
        ),
        Collective(
            phase="setup",
            op="broadcast",
            dtype="int64",
            term="parameter shapes compared",
            payload_bytes=16 * dimensions,
        ),
    ]
    for dtype, size in _by_dtype([*setting.parameters, *setting.buffers]).items():
        found.append(
            Collective(
                phase="setup",
                op="broadcast",
                dtype=dtype,
                term="initial state broadcast",
                payload_bytes=size,
                calls=1 if size <= BROADCAST_BUCKET_BYTES else None,
            )
        )
    return found


def _step(setting: Setting, step: int) -> list[Collective]:
    found = _rebuilt_buckets(setting) if step == 1 else []
    # `require_forward_param_sync` is left true by the last forward pass that synchronised; the forward
    # passes of an evaluation leave it false.
    if not setting.follows_evaluation(step):
        found += _buffers(setting, "forward")
    for dtype, size in _by_dtype(setting.parameters).items():
        one_bucket = step == 0 or size <= FIRST_BUCKET_BYTES
        found.append(
            Collective(
                phase="backward",
                op="all_reduce",
                dtype=dtype,
                term=GRADIENTS,
                payload_bytes=size,
                # Before the buckets are rebuilt there is one of unlimited size.
                calls=1 if one_bucket else None,
            )
        )
    return found


def _rebuilt_buckets(setting: Setting) -> list[Collective]:
    """After the first reduction the buckets follow the order in which gradients came.

    `Reducer::sync_bucket_indices` (reducer.cpp) broadcasts, as int32, the index of every parameter and
    the number of buckets, then the size of each bucket.
    """
    buckets = _bucket_count(setting)
    width = DTYPE_BYTES["int32"]
    return [
        Collective(
            phase="forward",
            op="broadcast",
            dtype="int32",
            term=REBUILT,
            payload_bytes=width * (len(setting.parameters) + 1 + buckets),
            calls=2,
        )
    ]


def _bucket_count(setting: Setting) -> int:
    """Buckets when gradients come in the reverse order of the parameters.

    `compute_bucket_assignment_by_size` (reducer.cpp) closes a bucket, per dtype, once it has reached its
    limit: FIRST_BUCKET_BYTES for the first, BUCKET_BYTES for the others.
    """
    open_bytes: dict[str, int] = {}
    limits: dict[str, int] = {}
    closed = 0
    for tensor in reversed(setting.parameters):
        size = open_bytes.get(tensor.dtype, 0) + tensor.bytes
        if size >= limits.get(tensor.dtype, FIRST_BUCKET_BYTES):
            closed, size = closed + 1, 0
            limits[tensor.dtype] = BUCKET_BYTES
        open_bytes[tensor.dtype] = size
    return closed + sum(size > 0 for size in open_bytes.values())


def _evaluation(setting: Setting) -> list[Collective]:
    """Only the first pass of an evaluation broadcasts the buffers: it follows one that synchronised."""
    spells = range(setting.evaluation_spells)
    return [collective for _ in spells for collective in _buffers(setting, "evaluation")]


def _buffers(setting: Setting, phase: str) -> list[Collective]:
    """`_sync_buffers`: all buffers, coalesced by dtype (`broadcast_buffers` is true by default)."""
    return [
        Collective(phase=phase, op="broadcast", dtype=dtype, term=BUFFERS, payload_bytes=size)
        for dtype, size in _by_dtype(setting.buffers).items()
    ]


def _by_dtype(tensors: Sequence[Tensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    return sizes
