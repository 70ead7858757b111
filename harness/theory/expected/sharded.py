"""What FSDP1 and FSDP2 do alike: the role of the shard group, reduction over replicas, the norm."""

from __future__ import annotations

from harness.theory.expected.setting import (
    DTYPE_BYTES,
    NORM,
    PADDING,
    REPLICAS,
    Collective,
    Role,
    Setting,
)

Sizes = list[tuple[int, int]]
"""(elements, padded elements) of each unit."""
KEPT_BY_EVALUATION = "units that an evaluation left gathered are not gathered again"


def shard_role(setting: Setting) -> Role:
    """The shard group is the world unless the mesh has replicas."""
    return "world" if setting.shard_size == setting.world_size else "shard"


def reduce_dtype(setting: Setting) -> str:
    """The policy's `reduce_dtype`, which like for like is fp32 when mixed; else the compute dtype."""
    return "float32" if setting.mixed and setting.like_for_like else setting.compute_dtype


def across_replicas(setting: Setting, sizes: Sizes) -> list[Collective]:
    """Each rank all-reduces its reduced shard of every unit with the ranks that hold the same."""
    dtype, shards = reduce_dtype(setting), setting.shard_size
    width = DTYPE_BYTES[dtype]
    whole = sum(padded_numel for _, padded_numel in sizes) // shards * width
    exact = setting.parameter_count * width // shards
    common = {"phase": "backward", "op": "all_reduce", "dtype": dtype, "role": "replica"}
    found = [Collective(**common, term=REPLICAS, payload_bytes=exact, calls=len(sizes))]  # type: ignore[arg-type]
    if whole > exact:
        found.append(Collective(**common, term=PADDING, payload_bytes=whole - exact, calls=0))  # type: ignore[arg-type]
    return found


def norm(role: Role) -> Collective:
    """`backends/gradients.py`, global_norm: one fp64 sum of squares over the ranks of a shard group."""
    return Collective(phase="step", op="all_reduce", dtype="float64", term=NORM, payload_bytes=8, role=role)
