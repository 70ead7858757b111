"""Model states of DeepSpeed ZeRO stage 3: every parameter is flattened and cut into N pieces."""

from __future__ import annotations

from typing import Any

from harness.backends.presets import COMMUNICATION_DTYPE, ZERO3_DEFAULTS, ZERO_BUCKET_DEFAULT, zero_changes
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
from harness.theory.memory.zero import FP32_SURPLUS, gradient_accumulation_bytes

SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed 0.19.8, `runtime/zero/config.py`, `sub_group_size`, in elements of the rank's pieces."""


def zero3_states(setting: Setting) -> ModelStates:
    """Closed form per rank, from DeepSpeed 0.19.8.

    `partition_parameters.py`, `_partition_param`: each parameter is padded to a multiple of N. `stage3.py`:
    `_create_fp16_partitions_with_defragmentation` lays the pieces into one buffer; `_create_fp32_partitions`
    copies them for the optimizer, in fp32 too (it compares a device with the name of one, which never
    agree); `_setup_for_real_optimizer` keeps a gradient of every piece, in the dtype in which micro-steps add
    up, and one reduction bucket for good.
    With the optimizer offloaded, `initialize_optimizer_states` keeps a second gradient on the host.
    Parameters up to the persistence threshold stay gathered.
    """
    width, trained, ranks = setting.compute_bytes, setting.trained_bytes, setting.world_size
    accumulated = gradient_accumulation_bytes(3, setting)
    offload = setting.offload != "none"
    pieces = sum(-(-numel(parameter) // ranks) for parameter in setting.layout.parameters)
    own = sum(_own(numel(parameter), ranks, setting.rank) for parameter in setting.layout.parameters)
    pad = "padding of each parameter to N pieces"
    cut = Share(own=own, padding=pieces - own, padding_name=pad)
    fp32 = setting.precision == "fp32"
    masters = "second fp32 copy of own pieces" if fp32 else "masters of own pieces"
    return states(
        [
            *cut.terms("weights", "own pieces", width, host=setting.offload == "cpu"),
            Term(kind="gathered", name="parameters below the persistence threshold",
                 bytes=_persistent_elements(setting) * width, extra=True),
            *cut.terms("masters", masters, trained, host=offload, extra=fp32),
            Term(kind="gradients", name="own pieces", bytes=own * width, host=offload),
            Term(kind="gradients", name=FP32_SURPLUS, bytes=own * (accumulated - width), host=offload,
                 extra=True),
            Term(kind="gradients", name=pad, bytes=(pieces - own) * accumulated, host=offload, extra=True),
            Term(kind="gradients", name="second gradient for the offloaded optimizer",
                 bytes=pieces * trained if offload else 0, host=True, extra=True),
            *cut.terms("optimizer", "Adam's moments of own pieces", ADAM_MOMENTS * trained, host=offload),
            step_counters(_sub_groups(setting)),
            Term(kind="communication", name="persistent reduction bucket",
                 bytes=_bucket_elements(setting) * _reduce_bytes(setting), extra=True),
            *buffer_terms(setting),
        ]
    )  # fmt: skip


def _own(count: int, ranks: int, rank: int) -> int:
    piece = -(-count // ranks)
    return max(0, min(count - piece * rank, piece))


def _bucket_elements(setting: Setting) -> int:
    given = setting.options.get("reduce_bucket_size")
    if given is not None:
        return int(given)
    return int(_changed(setting).get("reduce_bucket_size", ZERO_BUCKET_DEFAULT))


def _reduce_bytes(setting: Setting) -> int:
    """Dtype of reduction: `engine.communication_data_type`; like-for-like asks for fp32 when mixed."""
    return 4 if COMMUNICATION_DTYPE in _changed(setting) else setting.compute_bytes


def _persistent_elements(setting: Setting) -> int:
    """`parameter_offload.py`, `mark_persistent_parameters`: all up to the threshold, padded to N pieces."""
    name = "stage3_param_persistence_threshold"
    if setting.world_size == 1:
        return 0  # `NoGatherHandle`: the parameter is a view of its only piece
    threshold = _changed(setting).get(name, ZERO3_DEFAULTS[name])
    counts = map(numel, setting.layout.parameters)
    return sum(ceil_to(count, setting.world_size) for count in counts if count <= threshold)


def _changed(setting: Setting) -> dict[str, Any]:
    count = elements(setting.layout.parameters)
    changes = zero_changes(3, setting.precision, setting.preset, count)  # type: ignore[arg-type]
    return {change.setting: change.value for change in changes}


def _sub_groups(setting: Setting) -> int:
    """`_create_fp16_sub_groups` closes a sub-group once its pieces reach the size."""
    total = 0
    for group in setting.groups():
        held, closed = 0, 0
        for parameter in group:
            held += -(-numel(parameter) // setting.world_size)
            if held >= SUB_GROUP_ELEMENTS:
                closed, held = closed + 1, 0
        total += closed + (1 if held else 0)
    return total
