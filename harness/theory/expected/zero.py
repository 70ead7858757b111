"""DeepSpeed 0.19.8, ZeRO stages 0, 1 and 2, natively and through Accelerate."""

from __future__ import annotations

from harness.backends.presets import BUCKET_ELEMENTS, ZERO_BUCKET_DEFAULT
from harness.theory.expected.setting import (
    COMPUTE,
    DTYPE_BYTES,
    FURTHER_GRADIENTS,
    GRADIENTS,
    NORM,
    OVERFLOW,
    UPDATED,
    Collective,
    Setting,
    Tensor,
    Volume,
    gathered,
    over_steps,
    padded,
)

START_ALIGNMENT = 2
"""`nccl_start_alignment_factor` of DeepSpeedZeroOptimizer (stage_1_and_2.py)."""
FALLBACK_BUCKET_ELEMENTS = 500_000_000
"""`MEMORY_OPT_ALLREDUCE_SIZE` (engine.py), the bucket of stage 0."""
ALL_REDUCED = "DeepSpeed all-reduces gradients whatever reduce_scatter says, the textbook reduce-scatters"


def zero0_volume(setting: Setting) -> Volume:
    """Stage 0: `buffered_allreduce_fallback` (engine.py) at the accumulation boundary."""
    return Volume(collectives=(*broadcast_model(setting), *over_steps(setting, _zero0_step)))


def zero12_volume(setting: Setting, *, every_micro_step: bool) -> Volume:
    """Stages 1 and 2.

    `DeepSpeedZeroOptimizer.average_tensor` (stage_1_and_2.py) all-reduces each bucket, since
    `use_multi_rank_bucket_allreduce` is true; stage 2 does so in every micro-step
    (`DeepSpeedEngine.allreduce_gradients`).
    """

    def step(setting: Setting, _: int) -> list[Collective]:
        return _zero12_step(setting, every_micro_step)

    found = [*broadcast_model(setting), *over_steps(setting, step)]
    if setting.digest:
        # `safe_get_full_fp32_param` all-reduces a whole fp32 buffer per parameter (tensor_fragment.py).
        found += gathered(
            "digest", "weights assembled for their digest", _exact(setting.parameters), "float32",
            op="all_reduce",
        )  # fmt: skip
    return Volume(collectives=tuple(found), remarks=((GRADIENTS, ALL_REDUCED),))


def zero1_volume(setting: Setting) -> Volume:
    """Stage 1: gradients are reduced at the accumulation boundary."""
    return zero12_volume(setting, every_micro_step=False)


def zero2_volume(setting: Setting) -> Volume:
    """Stage 2: gradients are reduced in every micro-step, to be partitioned."""
    return zero12_volume(setting, every_micro_step=True)


def reduce_dtype(setting: Setting) -> str:
    """`DeepSpeedEngine.communication_data_type`; like for like it is set to fp32 at mixed precision."""
    return "float32" if setting.mixed and setting.like_for_like else COMPUTE[setting.precision]


def optimizer_groups(setting: Setting) -> list[list[Tensor]]:
    """The optimizer's parameter groups, each of which is one flat buffer: what decays, and the rest."""
    decaying = [t for t in setting.parameters if t.name in setting.decaying]
    rest = [t for t in setting.parameters if t.name not in setting.decaying]
    return [group for group in (decaying, rest) if group]


def broadcast_model(setting: Setting) -> list[Collective]:
    """`DeepSpeedEngine._broadcast_model` sends every parameter as bytes, in the model's compute dtype."""
    size = setting.parameter_count * DTYPE_BYTES[COMPUTE[setting.precision]]
    return [
        Collective(
            phase="setup", op="broadcast", dtype="uint8", term="initial weights broadcast",
            payload_bytes=size, calls=len(setting.parameters),
        )
    ]  # fmt: skip


def bucket_calls(setting: Setting) -> int | None:
    """1 where all gradients fit into one bucket; else it depends on the order in which they come."""
    bucket = setting.reduce_bucket_elements
    if bucket is None:
        bucket = ZERO_BUCKET_DEFAULT
        if setting.like_for_like:
            bucket = min(BUCKET_ELEMENTS, setting.parameter_count + 1)
    return 1 if setting.parameter_count <= bucket else None


def _zero0_step(setting: Setting, _: int) -> list[Collective]:
    dtype = reduce_dtype(setting)
    found = [
        Collective(
            phase="backward",
            op="all_reduce",
            dtype=dtype,
            term=GRADIENTS,
            payload_bytes=setting.parameter_count * DTYPE_BYTES[dtype],
            calls=1 if setting.parameter_count <= FALLBACK_BUCKET_ELEMENTS else None,
        )
    ]
    if setting.precision == "fp32" and setting.clipping:
        # `clip_grad_norm_` (runtime/utils.py) averages the norm over the ranks.
        found.append(Collective(phase="step", op="all_reduce", dtype="float32", term=NORM, payload_bytes=4))
    return found


def _zero12_step(setting: Setting, every_micro_step: bool) -> list[Collective]:
    dtype, compute = reduce_dtype(setting), COMPUTE[setting.precision]
    size = setting.parameter_count * DTYPE_BYTES[dtype]
    calls = bucket_calls(setting)
    found = [
        Collective(
            phase="backward", op="all_reduce", dtype=dtype, term=GRADIENTS, payload_bytes=size, calls=calls
        )
    ]
    further = setting.accumulation_steps - 1
    if every_micro_step and further:
        found.append(
            Collective(
                phase="backward", op="all_reduce", dtype=dtype, term=FURTHER_GRADIENTS,
                payload_bytes=size * further, calls=calls and calls * further,
            )
        )  # fmt: skip
    groups = optimizer_groups(setting)
    if setting.precision != "fp32":
        # `has_overflow`, one byte; `_configure_zero_optimizer` checks in bf16 and fp16 only.
        found.append(Collective(phase="step", op="all_reduce", dtype="uint8", term=OVERFLOW, payload_bytes=1))
    # `scaled_global_norm`: one fp32 sum of squares per group.
    found.append(
        Collective(
            phase="step", op="all_reduce", dtype="float32", term=NORM, payload_bytes=4 * len(groups),
            calls=len(groups),
        )
    )  # fmt: skip
    if setting.world_size > 1:
        # `all_gather_into_tensor_dp_groups` (runtime/utils.py): each flat group, aligned to the ranks.
        alignment = START_ALIGNMENT * setting.world_size
        sizes = [
            (numel, padded(numel, alignment)) for numel in (sum(t.numel for t in group) for group in groups)
        ]
        found += gathered("step", UPDATED, sizes, compute)
    return found


def _exact(tensors: tuple[Tensor, ...]) -> list[tuple[int, int]]:
    return [(tensor.numel, tensor.numel) for tensor in tensors]
