"""DeepSpeed 0.19.8, ZeRO stages 1 and 2, natively and through Accelerate."""

from __future__ import annotations

from dataclasses import dataclass

from harness.backends.presets import MULTI_RANK_BUCKET
from harness.forms import terms
from harness.forms.layout import DTYPE_BYTES, Layout, Tensor, ceil_to, derived, elements
from harness.forms.single import ADAM_MOMENTS, buffer_terms, step_counters, whole_frozen
from harness.forms.workload import Workload
from harness.forms.zero0 import (
    FP32_SURPLUS,
    SECOND_FP32_COPY,
    bucket_calls,
    gradient_accumulation_bytes,
    reduce_dtype,
)

START_ALIGNMENT_ELEMENTS = 2
"""`nccl_start_alignment_factor` of DeepSpeedZeroOptimizer (`runtime/zero/stage_1_and_2.py`)."""
PADDING = "padding of the partition"
ACCUMULATED_ON_HOST = "accumulated over micro-steps on the host"
ZEROS = "zeros for parameters that no gradient reaches"
ALL_REDUCED = "DeepSpeed all-reduces gradients whatever reduce_scatter says, the textbook reduce-scatters"


def model_states(workload: Workload) -> terms.ModelStates:
    """Closed form per rank, from `runtime/zero/stage_1_and_2.py`.

    `DeepSpeedZeroOptimizer.__init__` flattens each optimizer group into `bit16_groups_flat`, padded to a
    multiple of 2 N elements, and clones this rank's 1/N of it into `single_partition_of_fp32_groups`, in
    fp32 too. After a backward pass `averaged_gradients` are views of `grads_in_partition`, which
    `copy_grads_in_partition` sizes by the whole of every parameter that reaches into the partition, and
    zeros for the padding (`get_flat_partition`); where micro-steps add up in fp32 though gradients are of
    low precision, one fp32 buffer of just the partition (`_build_compact_grad_partition_buffer`). Adam has
    one flat parameter per group.
    """
    width, trained = workload.compute_bytes, workload.master_bytes
    offload = workload.offload != "none"
    piece = _partition(workload)
    count = workload.layout.trained_count
    flat = terms.Share(
        own=count, padding=piece.flat - count, padding_name="alignment of groups to 2 N elements"
    )
    part = terms.Share(own=piece.inside, padding=piece.padding, padding_name=PADDING)
    fp32 = workload.precision == "fp32"
    masters = (SECOND_FP32_COPY if fp32 else "masters") + " of the partition"
    gradients = _offloaded_gradients if offload else _gradients
    return terms.states(
        [
            *flat.terms("weights", "whole weights", width),
            whole_frozen(workload),
            *part.terms("masters", masters, trained, host=offload, extra=fp32),
            *part.terms("optimizer", "Adam's moments of the partition", ADAM_MOMENTS * trained, host=offload),
            step_counters(len(workload.layout.update_groups()), workload),
            *buffer_terms(workload),
            *gradients(workload, piece),
        ]
    )


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in its flat group."""

    tensor: Tensor
    group: int
    first: int
    """Partition that its first element is in."""
    last: int
    own: int
    """Elements in the rank's partition."""


@derived
def places(layout: Layout, ranks: int, rank: int) -> list[tuple[int, list[Place]]]:
    """Elements of a partition of each flat group, and the group's parameters."""
    found = []
    for index, group in enumerate(layout.update_groups()):
        piece, end, placed = ceil_to(elements(group), START_ALIGNMENT_ELEMENTS * ranks) // ranks, 0, []
        for tensor in group:
            begin, end = end, end + tensor.numel
            own = max(0, min(end, piece * (rank + 1)) - max(begin, piece * rank))
            placed.append(Place(tensor, index, begin // piece, (end - 1) // piece, own))
        found.append((piece, placed))
    return found


@dataclass(frozen=True, kw_only=True)
class _Partition:
    """One rank's part of the flat groups, in elements."""

    flat: int
    """All groups with their padding."""
    own: int
    """The rank's part, padding included."""
    inside: int
    """Parameters in it."""
    straddling: int
    """What the parameters that reach into it have outside of it."""
    unreached: int
    """All of those parameters that no gradient reaches."""

    @property
    def padding(self) -> int:
        return self.own - self.inside


def updated_tensors(workload: Workload) -> list[list[int]]:
    """The rank's partition of each group, padding included: one flat tensor that is stepped by itself
    (`DeepSpeedZeroOptimizer._optimizer_step`)."""
    return [[piece] for piece, _ in places(workload.layout, workload.world_size, workload.rank)]


def _partition(workload: Workload) -> _Partition:
    flat = own = inside = straddling = unreached = 0
    left_out = workload.layout.unreached or frozenset()
    for piece, placed in places(workload.layout, workload.world_size, workload.rank):
        touched, part = [p.tensor for p in placed if p.own], sum(p.own for p in placed)
        flat += piece * workload.world_size
        own += piece
        inside += part
        straddling += elements(touched) - part
        unreached += elements(tensor for tensor in touched if tensor.name in left_out)
    return _Partition(flat=flat, own=own, inside=inside, straddling=straddling, unreached=unreached)


def _gradients(workload: Workload, piece: _Partition) -> list[terms.Term]:
    width, accumulated = workload.compute_bytes, gradient_accumulation_bytes(workload)
    straddling = 0 if accumulated > width else piece.straddling * width
    rest = "rest of parameters that straddle the partition's ends"
    surplus = piece.inside * (accumulated - width)
    return [
        terms.Term(kind="gradients", name="partition", bytes=piece.inside * width),
        # `all_grad_tensors` has them whole, beside the room that `grads_in_partition` keeps for them.
        terms.Term(kind="gradients", name=ZEROS, bytes=piece.unreached * width, extra=True),
        terms.Term(kind="gradients", name=FP32_SURPLUS, bytes=surplus, extra=True),
        terms.Term(kind="gradients", name=rest, bytes=straddling, extra=True),
        terms.Term(kind="gradients", name=PADDING, bytes=piece.padding * accumulated, extra=True),
    ]


def keeps_plain_gradients(workload: Workload) -> bool:
    """Whether gradients of a partition stay on the device, in the dtype in which they come."""
    return workload.offload == "none" and gradient_accumulation_bytes(workload) == workload.compute_bytes


def _offloaded_gradients(workload: Workload, piece: _Partition) -> list[terms.Term]:
    """Offload of the optimizer: gradients are copied to the host as they are reduced.

    `initialize_optimizer_states` keeps a gradient of each partition on the host for good;
    `temp_grad_buffer_for_cpu_offload` and `.._gpu_offload` hold the largest parameter once on either side;
    `param_buffer_of_bit16_for_cpu_offload_groups` stages the updated weights. With accumulation
    stage 2, which reduces in every micro-step, keeps every parameter that reaches into the partition in
    `accumulated_grads_in_cpu` (`async_accumulate_grad_in_cpu_via_gpu`), unless masters are in the low
    precision; stage 1 reduces once and `setup_buckets` stays at its first micro-step. Where micro-steps
    add up in a wider dtype than the gradients', they do so on the device, in a buffer of just the partition
    (`_build_compact_grad_partition_buffer`).
    """
    width, accumulation_bytes = workload.compute_bytes, gradient_accumulation_bytes(workload)
    wider = accumulation_bytes > width
    every_micro_step = workload.strategy.stage == 2 and workload.accumulation_steps > 1
    on_host = every_micro_step and workload.precision != "bf16" and not wider
    accumulated = (piece.inside + piece.straddling) * width if on_host else 0
    on_device = piece.own * accumulation_bytes if wider else 0
    largest = max(parameter.numel for parameter in workload.layout.trained) * width

    def gradients(name: str, size: int, *, host: bool = False, extra: bool = True) -> terms.Term:
        return terms.Term(kind="gradients", name=name, bytes=size, host=host, extra=extra)

    def buffer(name: str, size: int, *, host: bool = False) -> terms.Term:
        return terms.Term(kind="communication", name=name, bytes=size, host=host, extra=True)

    kept = piece.own * workload.master_bytes
    return [
        gradients("partition, added up on the device", on_device),
        gradients("partition, kept on the host", kept, host=True, extra=False),
        gradients(ACCUMULATED_ON_HOST, accumulated, host=True),
        buffer("host buffer of one gradient", largest, host=True),
        buffer("device buffer of one gradient", largest),
        buffer("host buffer of updated weights", piece.own * width, host=True),
    ]


def collectives(workload: Workload) -> terms.Volume:
    """Gradients all-reduced, or each part reduced to its owner; each rank's part of the weights updated and
    gathered.

    `DeepSpeedZeroOptimizer.average_tensor` (stage_1_and_2.py) all-reduces each bucket unless
    `use_multi_rank_bucket_allreduce` is false: stage 1 at the accumulation boundary, stage 2 in every
    micro-step, to partition them (`DeepSpeedEngine.allreduce_gradients`).
    """
    found = tuple(terms.over_steps(workload, _step))
    return terms.Volume(collectives=found, remarks=((terms.GRADIENTS, ALL_REDUCED),))


def reduces_to_owners(workload: Workload) -> bool:
    """Whether each part of the gradients is reduced to the rank that keeps it."""
    return workload.options.get(MULTI_RANK_BUCKET) is False


def _step(workload: Workload, _: int) -> list[terms.Collective]:
    dtype = reduce_dtype(workload)
    size = elements(workload.layout.reached) * DTYPE_BYTES[dtype]
    # To its owner each part is reduced by itself, and parts of a bucket that lie together in one call.
    to_owners = reduces_to_owners(workload)
    op, calls = ("reduce", None) if to_owners else ("all_reduce", bucket_calls(workload))
    found = [terms.Collective("backward", op, dtype, terms.GRADIENTS, size, calls)]
    further = workload.accumulation_steps - 1
    if workload.strategy.stage == 2 and further:
        found.append(
            terms.Collective(
                "backward", op, dtype, terms.FURTHER_GRADIENTS, size * further, calls and calls * further
            )
        )
    groups = workload.layout.update_groups()
    if workload.precision != "fp32":
        # `has_overflow`, one byte; `_configure_zero_optimizer` checks in bf16 and fp16 only.
        found.append(terms.Collective("step", "all_reduce", "uint8", terms.OVERFLOW, 1))
    # `scaled_global_norm`: one fp32 sum of squares per group.
    found.append(terms.Collective("step", "all_reduce", "float32", terms.NORM, 4 * len(groups), len(groups)))
    if workload.world_size > 1:
        # `all_gather_into_tensor_dp_groups` (runtime/utils.py): each flat group, aligned to the ranks.
        alignment = START_ALIGNMENT_ELEMENTS * workload.world_size
        sizes = [(count, ceil_to(count, alignment)) for count in map(elements, groups)]
        found += terms.gathered("step", terms.UPDATED, sizes, workload.compute_dtype)
    return found
