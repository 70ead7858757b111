"""ZeRO-Infinity's weights in files: their buffers, and pieces that are in memory while they are used.

DeepSpeed 0.19.8, `runtime/swap_tensor/partitioned_param_swapper.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.model.blocks import block_classes
from harness.backends.options import Zero3Options, gathers_blocks
from harness.backends.presets import ZERO3_DEFAULTS, ZERO3_PREFETCH_ELEMENTS

from ..refusals import Unsupported

COUNT = 5
"""`buffer_count` of 'offload_param' (zero/offload_config.py)."""
LEAST_BYTES = 1024**2
"""`MIN_AIO_BYTES` (utils.py): a smaller piece of a weight stays in memory."""
ALIGNMENT_BYTES = 1024
"""`AIO_ALIGNED_BYTES`, for one thread per request."""


def weight_buffers(
    model: nn.Module, options: Zero3Options, zero: Mapping[str, Any], ranks: int, width: int
) -> dict[str, int]:
    """`buffer_count` and `buffer_size` (elements) for a model that is not partitioned yet.

    `zero`: DeepSpeed's section of settings; `width`: bytes of an element of a weight. Raises Unsupported
    where DeepSpeed would run out of buffers.
    """
    _require_release(zero)
    pieces = {id(p): -(-p.numel() // ranks) for p in model.parameters()}
    in_files = {key: piece for key, piece in pieces.items() if piece * width >= LEAST_BYTES}
    largest = max(in_files.values(), default=1)
    size = options.buffer_size or largest
    if size < largest:
        raise Unsupported(
            f"buffer_size={size} does not hold a rank's largest piece of a weight; give {largest} or more"
        )
    count, needed = options.buffer_count or COUNT, _gathered_at_once(model, options, in_files)
    if count < needed:
        raise Unsupported(
            f"a module gathers {needed} weights from files at once, each into a buffer of its own, of which "
            f"there are {count}; give buffer_count={needed} or more"
        )
    return {"buffer_count": count, "buffer_size": size}


def _require_release(zero: Mapping[str, Any]) -> None:
    """Raise Unsupported for weights that stay gathered after use."""
    name = "stage3_max_reuse_distance"
    reuse = zero.get(name, ZERO3_DEFAULTS[name])
    live = zero.get("stage3_max_live_parameters", ZERO3_DEFAULTS["stage3_max_live_parameters"])
    if reuse or (live and zero.get("stage3_prefetch_bucket_size", ZERO3_PREFETCH_ELEMENTS)):
        raise Unsupported(
            f"DeepSpeed {version('deepspeed')} holds a buffer for each weight from a file while it stays "
            "gathered, and fails where none is left ('Not enough buffers'); set stage3_max_reuse_distance=0 "
            "and stage3_max_live_parameters=0, as preset=like-for-like does"
        )


def _gathered_at_once(model: nn.Module, options: Zero3Options, in_files: Mapping[int, int]) -> int:
    """The most weights from files that a module, or a block that is gathered as one, uses."""
    blocks = set(block_classes(model)) if gathers_blocks(options) else set()
    most = 0
    for module in model.modules():
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        own = module.parameters(recurse=name in blocks)
        most = max(most, sum(id(parameter) in in_files for parameter in own))
    return most


def locked_bytes(
    settings: Mapping[str, Any], sub_groups: Sequence[Sequence[int]], ranks: int, width: int
) -> int:
    """Bytes locked in memory for weights, up to padding: the buffers, and one for updated weights.

    That one is as long as all weights of a sub-group, of which each rank writes its pieces
    (`_create_fp16_partitions_with_defragmentation`, stage3.py).
    """
    largest = max(sub_groups, key=sum, default=())
    sizes = [*[settings["buffer_size"]] * settings["buffer_count"], *(piece * ranks for piece in largest)]
    return sum(-(-size * width // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)


def in_file(parameter: Any) -> bool:
    """Whether this rank's piece of a parameter lies in a file while no module uses it."""
    return getattr(getattr(parameter, "ds_tensor", None), "final_location", None) == "nvme"


def swapper_of(parameters: Iterable[Any]) -> Any | None:
    """What reads and writes the weights; None: they lie in memory."""
    return next((s for p in parameters if (s := getattr(p, "nvme_swapper", None)) is not None), None)


def mapped(folder: Path, count: int, dtype: torch.dtype) -> Tensor:
    """A tensor of `count` elements whose values the system may keep on disk, in a file of `folder` that goes
    with the tensor."""
    path = folder / "mapped"
    tensor = torch.from_file(str(path), shared=True, size=count, dtype=dtype)
    path.unlink()
    return tensor


def read_piece(parameter: Any, copy: Tensor) -> Tensor:
    """Copy this rank's piece of a partitioned parameter from its file to `copy`, which is returned."""
    release_read_ahead([parameter])
    parameter.nvme_swapper.swap_in([parameter], async_op=False)
    copy.copy_(parameter.ds_tensor)
    parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
    return copy


def write_piece(parameter: Any, values: Tensor) -> None:
    """Write this rank's piece of a partitioned parameter to its file."""
    release_read_ahead([parameter])
    parameter.nvme_swapper.swap_in([parameter], async_op=False)
    parameter.ds_tensor.copy_(values)
    parameter.nvme_swapper.swap_out_and_release([parameter])


def release_read_ahead(parameters: Iterable[Any]) -> None:
    """Free the buffers of pieces that were read for a module that did not run.

    The update writes to the buffer of such a piece, not to its file (`_partitioned_params_swap_out`,
    stage3.py), and the next reader finds the old weights.
    """
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in parameters:
        if not in_file(parameter) or parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE:
            continue
        if parameter.ds_tensor.status == PartitionedParamStatus.INFLIGHT:
            parameter.nvme_swapper.synchronize_reads()
        if parameter.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
            parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
