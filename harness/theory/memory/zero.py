"""Model states of DeepSpeed ZeRO, stages 0 to 2; stage 3 has a file of its own."""

from __future__ import annotations

from harness.backends.presets import DATA_TYPES, zero_changes
from harness.record import TensorPart
from harness.theory.memory.terms import (
    ADAM_MOMENTS,
    ModelStates,
    Setting,
    Share,
    Term,
    buffer_terms,
    ceil_to,
    elements,
    numel,
    states,
    step_counters,
)

START_ALIGNMENT_ELEMENTS = 2
"""DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `nccl_start_alignment_factor`."""

FP32_SURPLUS = "gradients add up in fp32"
"""Beyond the textbook's 2 bytes per gradient."""


def zero0_states(setting: Setting) -> ModelStates:
    """Stage 0: in fp32 a bare optimizer; at a mixed precision `FP16_UnfusedOptimizer` with fp32 masters.

    DeepSpeed 0.19.8, `runtime/fp16/unfused_optimizer.py`: `fp32_groups` clones every parameter; fp32
    gradients exist only inside `step`.
    """
    count = elements(setting.layout.parameters)
    mixed = setting.precision != "fp32"
    return states(
        [
            Term(kind="weights", name="whole weights", bytes=count * setting.compute_bytes),
            Term(kind="gradients", name="whole gradients", bytes=count * setting.compute_bytes),
            Term(kind="masters", name="fp32 copy of the weights", bytes=4 * count if mixed else 0),
            Term(kind="optimizer", name="Adam's moments", bytes=ADAM_MOMENTS * 4 * count),
            step_counters(len(setting.layout.parameters)),
            *buffer_terms(setting),
        ]
    )


def zero12_states(setting: Setting) -> ModelStates:
    """Stages 1 and 2, from DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`.

    `DeepSpeedZeroOptimizer.__init__` flattens each optimizer group into `bit16_groups_flat`, padded to a
    multiple of 2 N elements, and clones this rank's 1/N of it into `single_partition_of_fp32_groups`, in
    fp32 too. After a backward pass `averaged_gradients` are views of `grads_in_partition`, which
    `copy_grads_in_partition` sizes by the whole of every parameter that reaches into the partition, and
    zeros for the padding (`get_flat_partition`); where micro-steps add up in fp32 though gradients are of
    low precision, one fp32 buffer of just the partition (`_build_compact_grad_partition_buffer`). Adam has
    one flat parameter per group.
    """
    width, trained, ranks = setting.compute_bytes, setting.trained_bytes, setting.world_size
    offload = setting.offload != "none"
    whole = partition = inside = straddling = padding = 0
    for group in setting.groups():
        length = ceil_to(elements(group), START_ALIGNMENT_ELEMENTS * ranks)
        piece = length // ranks
        whole += length
        partition += piece
        touched, own = _reaching_into(group, piece * setting.rank, piece)
        inside += own
        straddling += elements(touched) - own
        padding += piece - own
    count = elements(setting.layout.parameters)
    pad = "padding of the partition"
    flat = Share(own=count, padding=whole - count, padding_name="alignment of groups to 2 N elements")
    part = Share(own=inside, padding=padding, padding_name=pad)
    fp32 = setting.precision == "fp32"
    masters = ("second fp32 copy" if fp32 else "masters") + " of the partition"
    terms = [
        *flat.terms("weights", "whole weights", width),
        *part.terms("masters", masters, trained, host=offload, extra=fp32),
        *part.terms("optimizer", "Adam's moments of the partition", ADAM_MOMENTS * trained, host=offload),
        step_counters(len(setting.groups())),
        *buffer_terms(setting),
    ]
    accumulated = gradient_accumulation_bytes(int(setting.backend[-1]), setting)
    if offload:
        return states([*terms, *_offloaded_gradients(setting, partition, inside + straddling, accumulated)])
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


def gradient_accumulation_bytes(stage: int, setting: Setting) -> int:
    """Bytes per element in which micro-steps add up: the compute dtype's unless the preset says fp32.

    DeepSpeed 0.19.8, `runtime/engine.py`, `DeepSpeedEngine.get_data_types`.
    """
    changes = zero_changes(stage, setting.precision, setting.preset, parameter_count=0)  # type: ignore[arg-type]
    return 4 if any(change.setting == DATA_TYPES for change in changes) else setting.compute_bytes


def _offloaded_gradients(
    setting: Setting, partition: int, touched: int, accumulation_bytes: int
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
    width = setting.compute_bytes
    wider = accumulation_bytes > width
    largest = max(numel(parameter) for parameter in setting.layout.parameters)
    every_micro_step = setting.backend.endswith("zero2") and setting.accumulation_steps > 1
    accumulated = touched if every_micro_step and setting.precision != "bf16" and not wider else 0
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
            bytes=partition * setting.trained_bytes,
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


def _reaching_into(group: list[TensorPart], begin: int, length: int) -> tuple[list[TensorPart], int]:
    """Parameters of a flat group with elements in [begin, begin + length), and those elements."""
    touched, own, position = [], 0, 0
    for parameter in group:
        end = position + numel(parameter)
        part = min(end, begin + length) - max(position, begin)
        if part > 0:
            touched.append(parameter)
            own += part
        position = end
    return touched, own
