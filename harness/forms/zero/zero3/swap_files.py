"""What ZeRO-Infinity keeps in files, and the buffers through which it is read."""

from __future__ import annotations

from collections.abc import Iterable

from harness.backends.options import SUB_GROUP_ELEMENTS
from harness.forms.common_states import ADAM_MOMENTS
from harness.forms.model.layout import Tensor, ceil_to
from harness.forms.terms import Term
from harness.forms.workload import Workload
from harness.forms.zero.stages import gradient_accumulation_bytes

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


BUFFERS_WEIGHT_FILES = 5
"""`buffer_count` of 'offload_param' (zero/offload_config.py)."""
READ_TERM = "page-locked buffers of weights"
UPDATED_TERM = "page-locked buffer of a sub-group's updated weights"
WHOLE = "nvme-all"


def is_in_file(workload: Workload, parameter: Tensor) -> bool:
    """Whether a rank's piece of a weight lies in a file (`swappable_tensor`)."""
    if workload.offload != WHOLE:
        return False
    return piece_elements(workload, [parameter]) * workload.compute_bytes >= LEAST_BYTES


def weights_in_memory(workload: Workload, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those of which no piece lies in a file."""
    return [parameter for parameter in parameters if not is_in_file(workload, parameter)]


def weight_files(workload: Workload) -> list[Term]:
    """Files of the rank's pieces, frozen ones too, each as long as the aligned piece."""
    if workload.offload != WHOLE:
        return []
    swapped = [p for p in workload.layout.parameters if is_in_file(workload, p)]
    return [Term(kind="weights", name="pieces of weights", bytes=sum(_aligned(workload, p) for p in swapped))]


def weight_buffers(workload: Workload) -> list[Term]:
    """Buffers into which pieces are read, `buffer_count` x `buffer_size`, and the one from which a
    sub-group's updated pieces are written.

    That one is as long as whole weights, not pieces: `_create_fp16_partitions_with_defragmentation`
    (stage3.py) asks for `ds_numel` of each parameter of the sub-group whose pieces have most elements.
    """
    if workload.offload != WHOLE:
        return []
    width = workload.compute_bytes
    swapped = [p for p in workload.layout.parameters if is_in_file(workload, p)]
    largest = max((piece_elements(workload, [p]) for p in swapped), default=1)
    size = int(workload.options.get("buffer_size") or largest)
    count = int(workload.options.get("buffer_count") or BUFFERS_WEIGHT_FILES)
    most = max(sub_groups_of(workload), key=lambda group: piece_elements(workload, group))
    updated = sum(ceil_to(p.numel * width, ALIGNMENT_BYTES) for p in most)
    return [
        Term(kind="communication", name=READ_TERM, bytes=count * ceil_to(size * width, ALIGNMENT_BYTES),
             host=True, extra=True),
        Term(kind="communication", name=UPDATED_TERM, bytes=updated, host=True, extra=True),
    ]  # fmt: skip


def _aligned(workload: Workload, parameter: Tensor) -> int:
    """Bytes of a rank's piece of a weight, up to the next multiple of the alignment (`_io_aligned_numel`)."""
    return ceil_to(piece_elements(workload, [parameter]) * workload.compute_bytes, ALIGNMENT_BYTES)
