"""DeepSpeed 0.19.8, ZeRO stages 1 and 2, natively and through Accelerate."""

from __future__ import annotations

from harness.theory.common_states import ADAM_MOMENTS, buffer_terms, step_counters
from harness.theory.dtypes import DTYPE_BYTES
from harness.theory.layout import Tensor, ceil_to, elements
from harness.theory.terms import (
    FURTHER_GRADIENTS,
    GRADIENTS,
    NORM,
    OVERFLOW,
    UPDATED,
    Collective,
    ModelStates,
    Share,
    Term,
    Volume,
    gathered,
    over_steps,
    states,
)
from harness.theory.workload import Workload
from harness.theory.zero import (
    FP32_SURPLUS,
    broadcast_model,
    bucket_calls,
    gradient_accumulation_bytes,
    reduce_dtype,
    with_checkpoint,
)

START_ALIGNMENT_ELEMENTS = 2
"""`nccl_start_alignment_factor` of DeepSpeedZeroOptimizer (`runtime/zero/stage_1_and_2.py`)."""
ALL_REDUCED = "DeepSpeed all-reduces gradients whatever reduce_scatter says, the textbook reduce-scatters"


def model_states(workload: Workload) -> ModelStates:
    """Closed form per rank, from `runtime/zero/stage_1_and_2.py`.

    `DeepSpeedZeroOptimizer.__init__` flattens each optimizer group into `bit16_groups_flat`, padded to a
    multiple of 2 N elements, and clones this rank's 1/N of it into `single_partition_of_fp32_groups`, in
    fp32 too. After a backward pass `averaged_gradients` are views of `grads_in_partition`, which
    `copy_grads_in_partition` sizes by the whole of every parameter that reaches into the partition, and
    zeros for the padding (`get_flat_partition`); where micro-steps add up in fp32 though gradients are of
    low precision, one fp32 buffer of just the partition (`_build_compact_grad_partition_buffer`). Adam has
    one flat parameter per group.
    """
    width, trained, ranks = workload.compute_bytes, workload.master_bytes, workload.world_size
    offload = workload.offload != "none"
    whole = partition = inside = straddling = padding = 0
    for group in workload.layout.groups():
        length = ceil_to(elements(group), START_ALIGNMENT_ELEMENTS * ranks)
        piece = length // ranks
        whole += length
        partition += piece
        touched, own = _reaching_into(group, piece * workload.rank, piece)
        inside += own
        straddling += elements(touched) - own
        padding += piece - own
    count = workload.layout.parameter_count
    pad = "padding of the partition"
    flat = Share(own=count, padding=whole - count, padding_name="alignment of groups to 2 N elements")
    part = Share(own=inside, padding=padding, padding_name=pad)
    fp32 = workload.precision == "fp32"
    masters = ("second fp32 copy" if fp32 else "masters") + " of the partition"
    terms = [
        *flat.terms("weights", "whole weights", width),
        *part.terms("masters", masters, trained, host=offload, extra=fp32),
        *part.terms("optimizer", "Adam's moments of the partition", ADAM_MOMENTS * trained, host=offload),
        step_counters(len(workload.layout.groups())),
        *buffer_terms(workload),
    ]
    accumulated = gradient_accumulation_bytes(workload)
    if offload:
        return states([*terms, *_offloaded_gradients(workload, partition, inside + straddling, accumulated)])
    if accumulated > width:
        straddling = 0
    return states(
        [
            *terms,
            Term(kind="gradients", name="partition", bytes=inside * width),
            Term(kind="gradients", name=FP32_SURPLUS, bytes=inside * (accumulated - width), extra=True),
            Term(
                kind="gradients",
                name="rest of parameters that straddle the partition's ends",
                bytes=straddling * width,
                extra=True,
            ),
            Term(kind="gradients", name=pad, bytes=padding * accumulated, extra=True),
        ]
    )


def _offloaded_gradients(
    workload: Workload, partition: int, touched: int, accumulation_bytes: int
) -> list[Term]:
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
    width = workload.compute_bytes
    wider = accumulation_bytes > width
    largest = max(parameter.numel for parameter in workload.layout.parameters)
    every_micro_step = workload.strategy.stage == 2 and workload.accumulation_steps > 1
    accumulated = touched if every_micro_step and workload.precision != "bf16" and not wider else 0
    return [
        Term(
            kind="gradients",
            name="partition, added up on the device",
            bytes=partition * accumulation_bytes if wider else 0,
            extra=True,
        ),
        Term(
            kind="gradients",
            name="partition, kept on the host",
            bytes=partition * workload.master_bytes,
            host=True,
        ),
        Term(
            kind="gradients",
            name="accumulated over micro-steps on the host",
            bytes=accumulated * width,
            host=True,
            extra=True,
        ),
        Term(
            kind="communication",
            name="host buffer of one gradient",
            bytes=largest * width,
            host=True,
            extra=True,
        ),
        Term(
            kind="communication",
            name="device buffer of one gradient",
            bytes=largest * width,
            extra=True,
        ),
        Term(
            kind="communication",
            name="host buffer of updated weights",
            bytes=partition * width,
            host=True,
            extra=True,
        ),
    ]


def _reaching_into(group: list[Tensor], begin: int, length: int) -> tuple[list[Tensor], int]:
    """Parameters of a flat group with elements in [begin, begin + length), and those elements."""
    touched, own, position = [], 0, 0
    for parameter in group:
        end = position + parameter.numel
        part = min(end, begin + length) - max(position, begin)
        if part > 0:
            touched.append(parameter)
            own += part
        position = end
    return touched, own


def collectives(workload: Workload) -> Volume:
    """Gradients all-reduced, each rank's part of the weights updated and gathered.

    `DeepSpeedZeroOptimizer.average_tensor` (stage_1_and_2.py) all-reduces each bucket, since
    `use_multi_rank_bucket_allreduce` is true: stage 1 at the accumulation boundary, stage 2 in every
    micro-step, to partition them (`DeepSpeedEngine.allreduce_gradients`).
    """
    found = [*broadcast_model(workload), *over_steps(workload, _step)]
    if workload.window.digest:
        # `safe_get_full_fp32_param` all-reduces a whole fp32 buffer per parameter (tensor_fragment.py).
        found += gathered(
            "digest", "weights assembled for their digest",
            [(tensor.numel, tensor.numel) for tensor in workload.layout.parameters], "float32",
            op="all_reduce",
        )  # fmt: skip
    volume = Volume(collectives=tuple(found), remarks=((GRADIENTS, ALL_REDUCED),))
    return with_checkpoint(workload, volume)


def _step(workload: Workload, _: int) -> list[Collective]:
    dtype = reduce_dtype(workload)
    size = workload.layout.parameter_count * DTYPE_BYTES[dtype]
    calls = bucket_calls(workload)
    found = [
        Collective(
            phase="backward", op="all_reduce", dtype=dtype, term=GRADIENTS, payload_bytes=size, calls=calls
        )
    ]
    further = workload.accumulation_steps - 1
    if workload.strategy.stage == 2 and further:
        found.append(
            Collective(
                phase="backward", op="all_reduce", dtype=dtype, term=FURTHER_GRADIENTS,
                payload_bytes=size * further, calls=calls and calls * further,
            )
        )  # fmt: skip
    groups = workload.layout.groups()
    if workload.precision != "fp32":
        # `has_overflow`, one byte; `_configure_zero_optimizer` checks in bf16 and fp16 only.
        found.append(Collective(phase="step", op="all_reduce", dtype="uint8", term=OVERFLOW, payload_bytes=1))
    # `scaled_global_norm`: one fp32 sum of squares per group.
    found.append(
        Collective(
            phase="step", op="all_reduce", dtype="float32", term=NORM, payload_bytes=4 * len(groups),
            calls=len(groups),
        )
    )  # fmt: skip
    if workload.world_size > 1:
        # `all_gather_into_tensor_dp_groups` (runtime/utils.py): each flat group, aligned to the ranks.
        alignment = START_ALIGNMENT_ELEMENTS * workload.world_size
        sizes = [(count, ceil_to(count, alignment)) for count in map(elements, groups)]
        found += gathered("step", UPDATED, sizes, workload.compute_dtype)
    return found
