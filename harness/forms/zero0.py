"""DeepSpeed 0.19.8: what the stages of ZeRO have in common, and stage 0, which is data parallelism."""

from __future__ import annotations

from typing import Any

from harness.backends.presets import COMMUNICATION_DTYPE, DATA_TYPES, ZERO_BUCKET_DEFAULT, zero_changes
from harness.forms.layout import DTYPE_BYTES, derived
from harness.forms.single import ADAM_MOMENTS, buffer_terms, step_counters, whole_frozen
from harness.forms.terms import GRADIENTS, NORM, Collective, ModelStates, Term, Volume, over_steps, states
from harness.forms.workload import Workload

FP32_SURPLUS = "gradients add up in fp32"
"""Beyond the textbook's 2 bytes per gradient."""
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""By DeepSpeed's."""
SECOND_FP32_COPY = "second fp32 copy"
"""Of weights that are fp32 already: DeepSpeed clones them for the optimizer as it does low-precision ones."""


@derived
def preset_values(workload: Workload) -> dict[str, Any]:
    """What the preset sets in DeepSpeed's configuration."""
    stage, count = workload.strategy.stage, workload.layout.parameter_count
    changes = zero_changes(stage, workload.precision, workload.preset, count)
    return {change.setting: change.value for change in changes}


def bucket_elements(workload: Workload) -> int:
    """`reduce_bucket_size`: as given, else by the preset."""
    given = workload.options.get("reduce_bucket_size")
    if given is not None:
        return int(given)
    return int(preset_values(workload).get("reduce_bucket_size", ZERO_BUCKET_DEFAULT))


def reduce_dtype(workload: Workload) -> str:
    """`DeepSpeedEngine.communication_data_type`; like for like it is fp32 at mixed precision, unless given.

    Where ranks divide samples `seq_parallel_communication_data_type` takes its place, which is fp32
    (DeepSpeed 0.19.8, engine.py, `_configure_distributed_model`).
    """
    if workload.strategy.sequence is not None:
        return "float32"
    given = workload.options.get(COMMUNICATION_DTYPE) or preset_values(workload).get(COMMUNICATION_DTYPE)
    return DTYPE_NAMES[given] if given else workload.compute_dtype


def gradient_accumulation_bytes(workload: Workload) -> int:
    """Bytes per element in which micro-steps add up: as given, else the preset's or the compute dtype's.

    DeepSpeed 0.19.8, `runtime/engine.py`, `DeepSpeedEngine.get_data_types`.
    """
    if (given := workload.options.get("grad_accum_dtype")) is not None:
        return DTYPE_BYTES[DTYPE_NAMES[given]]
    return 4 if DATA_TYPES in preset_values(workload) else workload.compute_bytes


def bucket_calls(workload: Workload) -> int | None:
    """1 where all gradients fit into one bucket; else it depends on the order in which they come."""
    return 1 if workload.layout.trained_count <= bucket_elements(workload) else None


def buckets_filled(workload: Workload) -> int:
    """Buckets that the gradients of one backward pass fill, taken from the last parameter to the first.

    A bucket is reduced when the next gradient would not fit into it; no gradient is split, so one that is
    larger than a bucket is reduced alone (DeepSpeed 0.19.8, stage3.py
    `reduce_independent_p_g_buckets_and_remove_grads`, and its namesake of stages 1 and 2).
    """
    limit, filled, buckets = bucket_elements(workload), 0, 1
    for parameter in reversed(workload.layout.trained):
        if filled and filled + parameter.numel > limit:
            buckets, filled = buckets + 1, 0
        filled += parameter.numel
    return buckets


FALLBACK_BUCKET_ELEMENTS = 500_000_000
"""`MEMORY_OPT_ALLREDUCE_SIZE` (engine.py)."""


def model_states(workload: Workload) -> ModelStates:
    """In fp32 a bare optimizer; at a mixed precision `FP16_UnfusedOptimizer` with fp32 masters.

    DeepSpeed 0.19.8, `runtime/fp16/unfused_optimizer.py`: `fp32_groups` clones every parameter; fp32
    gradients exist only inside `step`.
    """
    count = workload.layout.trained_count
    mixed = workload.precision != "fp32"
    return states(
        [
            Term(kind="weights", name="whole weights", bytes=count * workload.compute_bytes),
            whole_frozen(workload),
            Term(kind="gradients", name="whole gradients", bytes=count * workload.compute_bytes),
            Term(kind="masters", name="fp32 copy of the weights", bytes=4 * count if mixed else 0),
            Term(kind="optimizer", name="Adam's moments", bytes=ADAM_MOMENTS * 4 * count),
            step_counters(len(workload.layout.trained), workload),
            *buffer_terms(workload),
        ]
    )


def collectives(workload: Workload) -> Volume:
    """`buffered_allreduce_fallback` (engine.py) at the accumulation boundary."""
    return Volume(collectives=tuple(over_steps(workload, _step)))


def _step(workload: Workload, _: int) -> list[Collective]:
    dtype = reduce_dtype(workload)
    count = workload.layout.trained_count
    calls = 1 if count <= FALLBACK_BUCKET_ELEMENTS else None
    found = [Collective("backward", "all_reduce", dtype, GRADIENTS, count * DTYPE_BYTES[dtype], calls)]
    if workload.precision == "fp32" and workload.clips:
        # `clip_grad_norm_` (runtime/utils.py) averages the norm over the ranks.
        found.append(Collective("step", "all_reduce", "float32", NORM, 4))
    return found
