"""Which of stage 3's weights lie in files (ZeRO-Infinity), and what stays in memory for that.

DeepSpeed 0.19.8, `runtime/swap_tensor/partitioned_param_swapper.py`. Each rank's piece of a weight is swapped
by itself; `max_in_cpu` is 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.theory.layout import Tensor, ceil_to
from harness.theory.terms import Term
from harness.theory.workload import Workload
from harness.theory.zero3.swapping import ALIGNMENT_BYTES, LEAST_BYTES, piece_elements, sub_groups_of

BUFFERS = 5
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
    count = int(workload.options.get("buffer_count") or BUFFERS)
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
