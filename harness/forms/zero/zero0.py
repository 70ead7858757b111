"""DeepSpeed 0.19.8, ZeRO stage 0: data parallelism under DeepSpeed's engine."""

from __future__ import annotations

from harness.forms.common_states import ADAM_MOMENTS, buffer_terms, step_counters, whole_frozen
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.terms import GRADIENTS, NORM, Collective, ModelStates, Term, Volume, over_steps, states
from harness.forms.workload import Workload
from harness.forms.zero.stages import reduce_dtype

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
    found = [
        Collective(
            phase="backward",
            op="all_reduce",
            dtype=dtype,
            term=GRADIENTS,
            payload_bytes=workload.layout.trained_count * DTYPE_BYTES[dtype],
            calls=1 if workload.layout.trained_count <= FALLBACK_BUCKET_ELEMENTS else None,
        )
    ]
    if workload.precision == "fp32" and workload.clips:
        # `clip_grad_norm_` (runtime/utils.py) averages the norm over the ranks.
        found.append(Collective(phase="step", op="all_reduce", dtype="float32", term=NORM, payload_bytes=4))
    return found
