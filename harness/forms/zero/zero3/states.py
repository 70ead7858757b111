"""When ZeRO stage 3 gathers weights, its model states, and which of them lie in files (ZeRO-Infinity)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from harness.backends.options import SUB_GROUP_ELEMENTS
from harness.backends.presets import ZERO3_DEFAULTS, ZERO3_PREFETCH_ELEMENTS
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.layout import Tensor, ceil_to
from harness.forms.states import ADAM_MOMENTS, FROZEN, buffer_terms, step_counters
from harness.forms.terms import ModelStates, Share, Term, merged, states
from harness.forms.workload import Workload
from harness.forms.zero.stages import (
    FP32_SURPLUS,
    SECOND_FP32_COPY,
    bucket_elements,
    gradient_accumulation_bytes,
    preset_values,
    reduce_dtype,
)

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


OPTIONS = (*ZERO3_DEFAULTS, "stage3_prefetch_bucket_size", "leaf_module", "memory_efficient_linear")
"""Options of the backend that decide what is gathered when, and what that costs."""


@dataclass(frozen=True, kw_only=True)
class GatherLimits:
    """Limits in elements, as `PartitionedParameterCoordinator` (DeepSpeed 0.19.8) takes them."""

    persistence: int
    live: int
    reuse: int
    ahead: int
    parameters: int
    """Of the model."""
    blocks: tuple[str, ...]
    """Leaf modules: names of those that are gathered at once."""

    @cached_property
    def gathers_each_use(self) -> bool:
        """Whether each module's weights come for its own use and go after it."""
        return not self.reuse and not (self.live and self.ahead)

    @cached_property
    def keeps_for_backward(self) -> bool:
        """Whether everything that the forward pass gathers stays until the backward pass has used it.

        By reuse: no two uses are further apart than all uses together. By prefetch too: what is
        there already when the fetch queue passes its next use is not released (`__params_to_release`), and
        with room for the whole model the queue passes all uses at once.
        """
        uses = 2 * self.parameters
        if self.blocks:
            return False  # not derived: the reuse scan looks into all children of what it compares with
        return self.reuse >= uses or (self.live >= uses and self.ahead > self.parameters)

    def is_persistent(self, tensor: Tensor) -> bool:
        """`mark_persistent_parameters` (parameter_offload.py)."""
        return tensor.numel <= self.persistence

    def unit(self, tensor: Tensor) -> str:
        """The module with which a parameter is gathered."""
        block = next((name for name in self.blocks if tensor.name.startswith(f"{name}.")), None)
        return block or tensor.name.rpartition(".")[0]


def fetching(workload: Workload) -> GatherLimits:
    """Options as typed, else the preset's values, else the library's."""
    known = preset_values(workload)

    def value(name: str, default: int) -> int:
        given = workload.options.get(name)
        return int(known.get(name, default) if given is None else given)

    return GatherLimits(
        persistence=value(
            "stage3_param_persistence_threshold", ZERO3_DEFAULTS["stage3_param_persistence_threshold"]
        ),
        live=value("stage3_max_live_parameters", ZERO3_DEFAULTS["stage3_max_live_parameters"]),
        reuse=value("stage3_max_reuse_distance", ZERO3_DEFAULTS["stage3_max_reuse_distance"]),
        ahead=value("stage3_prefetch_bucket_size", ZERO3_PREFETCH_ELEMENTS),
        parameters=workload.layout.parameter_count,
        blocks=tuple(workload.layout.blocks) if workload.options.get("leaf_module") == "blocks" else (),
    )


def own_settings(workload: Workload) -> list[str]:
    """Options given that decide about gathering."""
    return [name for name in OPTIONS if workload.options.get(name) is not None]


SECOND_COPY = "second copy within a group of ranks (hpZ)"
SECOND_COPY_PADDING = "padding of the second copy"
PERSISTENT_PARAMETERS = "parameters below the persistence threshold"
REDUCTION_BUCKET = "persistent reduction bucket"


def model_states(workload: Workload) -> ModelStates:
    """Closed form per rank, from DeepSpeed 0.19.8.

    `partition_parameters.py`, `_partition_param`: each parameter is padded to a multiple of N. `stage3.py`:
    `_create_fp16_partitions_with_defragmentation` lays the pieces into one buffer; `_create_fp32_partitions`
    copies them for the optimizer, in fp32 too (it compares a device with the name of one, which never
    agree); `_setup_for_real_optimizer` keeps a gradient of every piece, in the dtype in which micro-steps add
    up, and one reduction bucket for good.
    With the optimizer offloaded, `initialize_optimizer_states` keeps a second gradient on the host.
    Offloaded to NVMe, states of large sub-groups lie in files, and with 'nvme-all' large pieces of weights
    too. Parameters up to the persistence threshold stay gathered.
    """
    width, trained = workload.compute_bytes, workload.master_bytes
    accumulated = gradient_accumulation_bytes(workload)
    offload = workload.offload != "none"
    pad = "padding of each parameter to N pieces"
    cut = _share(workload, workload.layout.trained, pad)
    kept = _share(workload, in_memory(workload), pad)
    weights = _share(workload, weights_in_memory(workload, workload.layout.trained), pad)
    fp32 = workload.precision == "fp32"
    masters = f"{SECOND_FP32_COPY} of own pieces" if fp32 else "masters of own pieces"
    return states(
        [
            *weights.terms("weights", "own pieces", width, host=workload.offloads_weights),
            *_frozen(workload, pad),
            *_second_copy(workload),
            Term(kind="gathered", name=PERSISTENT_PARAMETERS,
                 bytes=_persistent_elements(workload) * width, extra=True),
            *kept.terms("masters", masters, trained, host=offload, extra=fp32),
            Term(kind="gradients", name="own pieces", bytes=cut.own * width, host=offload),
            Term(kind="gradients", name=FP32_SURPLUS, bytes=cut.own * (accumulated - width), host=offload,
                 extra=True),
            Term(kind="gradients", name=pad, bytes=cut.padding * accumulated, host=offload, extra=True),
            Term(kind="gradients", name="second gradient for the offloaded optimizer",
                 bytes=(kept.own + kept.padding) * trained if offload else 0, host=True, extra=True),
            *kept.terms("optimizer", "Adam's moments of own pieces", ADAM_MOMENTS * trained, host=offload),
            step_counters(sub_groups(workload), workload),
            Term(kind="communication", name=REDUCTION_BUCKET,
                 bytes=bucket_elements(workload) * DTYPE_BYTES[reduce_dtype(workload)], extra=True),
            *buffers(workload),
            *weight_buffers(workload),
            *buffer_terms(workload),
        ],
        [*files(workload), *weight_files(workload)],
    )  # fmt: skip


def _frozen(workload: Workload, padding_name: str) -> list[Term]:
    """Pieces of weights that are not trained: cut as the others are (`Init._zero_init_param`)."""
    found: list[Term] = []
    ranks = workload.world_size
    for parameter in weights_in_memory(workload, workload.layout.frozen_parameters):
        own = _own(parameter.numel, ranks, workload.rank)
        share = Share(own=own, padding=-(-parameter.numel // ranks) - own, padding_name=padding_name)
        width = workload.held_bytes(parameter)
        found += share.terms("weights", FROZEN, width, host=workload.offloads_weights)
    return merged(found)


def _second_copy(workload: Workload) -> list[Term]:
    """hpZ: pieces within the rank's group of all weights that are gathered and released, frozen ones too,
    from the forward pass to the update (`Init._partition_param_sec`)."""
    ranks = workload.second_copy_ranks
    if ranks is None:
        return []
    found: list[Term] = []
    for parameter in workload.layout.parameters:
        if fetching(workload).is_persistent(parameter):
            continue
        piece = ceil_to(parameter.numel, workload.world_size) // ranks
        own = max(0, min(parameter.numel - piece * (workload.rank % ranks), piece))
        share = Share(own=own, padding=piece - own, padding_name=SECOND_COPY_PADDING)
        width, host = workload.held_bytes(parameter), workload.offload == "cpu"
        found += share.terms("weights", SECOND_COPY, width, host=host, extra=True)
    return merged(found)


def _share(workload: Workload, parameters: Iterable[Tensor], padding_name: str) -> Share:
    """One rank's pieces of some parameters."""
    listed = list(parameters)
    own = sum(_own(parameter.numel, workload.world_size, workload.rank) for parameter in listed)
    return Share(own=own, padding=piece_elements(workload, listed) - own, padding_name=padding_name)


def _own(count: int, ranks: int, rank: int) -> int:
    piece = -(-count // ranks)
    return max(0, min(count - piece * rank, piece))


def _persistent_elements(workload: Workload) -> int:
    """`parameter_offload.py`, `mark_persistent_parameters`: all up to the threshold, padded to N pieces,
    frozen ones too."""
    if workload.world_size == 1:
        return 0  # `NoGatherHandle`: the parameter is a view of its only piece
    kept = filter(fetching(workload).is_persistent, workload.layout.parameters)
    return sum(ceil_to(tensor.numel, workload.world_size) for tensor in kept)


def sub_groups(workload: Workload) -> int:
    """Parts of the optimizer's groups."""
    return len(updated_tensors(workload))


def updated_tensors(workload: Workload) -> list[list[int]]:
    """Elements of each sub-group, padding included: one flat tensor that is stepped by itself
    (`_optimizer_step`)."""
    return [[piece_elements(workload, group)] for group in sub_groups_of(workload)]
