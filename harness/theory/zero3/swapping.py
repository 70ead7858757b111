"""Which of stage 3's optimizer states lie in files (ZeRO-Infinity), and what stays in memory for that.

DeepSpeed 0.19.8, `runtime/swap_tensor`. Each sub-group is swapped as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.backends.options import SUB_GROUP_ELEMENTS
from harness.theory.common_states import ADAM_MOMENTS
from harness.theory.layout import Tensor, ceil_to
from harness.theory.terms import Term
from harness.theory.workload import Workload
from harness.theory.zero import gradient_accumulation_bytes

LEAST_BYTES = 1024**2
"""`MIN_AIO_BYTES` (utils.py): a smaller tensor stays in memory."""
ALIGNMENT_BYTES = 1024
"""`AIO_ALIGNED_BYTES`, for one thread per request: sizes of files are multiples of it."""
BUFFER_TERM = "page-locked buffers of a sub-group"
NAMES = {"masters": "masters", "optimizer": "Adam's moments", "gradients": "gradients"}
BUFFERS = 4
"""`buffer_count` of 'offload_optimizer' (zero/offload_config.py)."""


def sub_groups_of(workload: Workload) -> list[list[Tensor]]:
    """Parameters that are updated together: `_create_fp16_sub_groups` closes a sub-group at the size."""
    limit = int(workload.options.get("sub_group_size") or SUB_GROUP_ELEMENTS)
    found: list[list[Tensor]] = []
    for group in workload.layout.groups():
        members: list[Tensor] = []
        elements = 0
        for parameter in group:
            members.append(parameter)
            elements += piece_elements(workload, [parameter])
            if elements >= limit:
                found.append(members)
                members, elements = [], 0
        if members:
            found.append(members)
    return found


def piece_elements(workload: Workload, parameters: Iterable[Tensor]) -> int:
    """Elements of a rank's pieces, padding included."""
    return sum(-(-parameter.numel // workload.world_size) for parameter in parameters)


def swapped(workload: Workload) -> list[list[Tensor]]:
    """Sub-groups whose states lie in files (`is_swappable_tensor`)."""
    if not workload.swaps_into_files:
        return []
    return [
        group for group in sub_groups_of(workload) if _swappable(workload, piece_elements(workload, group))
    ]


def in_memory(workload: Workload) -> list[Tensor]:
    """The parameters of the other sub-groups."""
    away = {id(parameter) for group in swapped(workload) for parameter in group}
    return [parameter for parameter in workload.layout.trained if id(parameter) not in away]


def files(workload: Workload) -> list[Term]:
    """What lies in files once two steps were taken; each is as long as the aligned tensor.

    Gradients are written per parameter, without what exceeds a multiple of the alignment
    (`_adjust_for_misaligned_lengths`).
    """
    width, alignment = workload.master_bytes, ALIGNMENT_BYTES // workload.master_bytes
    aligned = sum(ceil_to(piece_elements(workload, group), alignment) for group in swapped(workload))
    pieces = (piece_elements(workload, [p]) for group in swapped(workload) for p in group)
    gradients = sum(piece // alignment * alignment for piece in pieces if _swappable(workload, piece))
    sizes = {"masters": aligned, "optimizer": ADAM_MOMENTS * aligned, "gradients": gradients}
    return [
        Term(kind=kind, name=f"{NAMES[kind]} of swapped sub-groups", bytes=size * width)
        for kind, size in sizes.items()
    ]


def buffers(workload: Workload) -> list[Term]:
    """Page-locked buffers, each of the largest sub-group whether it is swapped or not (`SwapBufferManager`),
    and gradients that are not written, where they are copies in the dtype of the masters."""
    if not workload.swaps_into_files:
        return []
    width, alignment = workload.master_bytes, ALIGNMENT_BYTES // workload.master_bytes
    largest = max(piece_elements(workload, group) for group in sub_groups_of(workload))
    return [
        Term(kind="communication", name=BUFFER_TERM,
             bytes=BUFFERS * ceil_to(largest, alignment) * width, host=True, extra=True),
        Term(kind="gradients", name="copies for the update that are not in files",
             bytes=_copied(workload) * width, host=True, extra=True),
    ]  # fmt: skip


def _copied(workload: Workload) -> int:
    """Elements of pieces that were converted for the update and of which not all is written: `narrow` keeps
    the whole copy (`_offload_grad_partition_at_boundary`, stage3.py)."""
    if gradient_accumulation_bytes(workload) == workload.master_bytes:
        return 0
    alignment = ALIGNMENT_BYTES // workload.master_bytes
    pieces = [piece_elements(workload, [p]) for group in swapped(workload) for p in group]
    return sum(piece for piece in pieces if piece % alignment or not _swappable(workload, piece))


def _swappable(workload: Workload, elements: int) -> bool:
    return elements * workload.master_bytes >= LEAST_BYTES
