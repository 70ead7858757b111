"""FullyShardedDataParallel (FSDP1) of torch 2.13 with original parameters."""

from __future__ import annotations

from dataclasses import dataclass

from harness.theory.expected.setting import (
    BACKWARD,
    DTYPE_BYTES,
    FORWARD,
    FURTHER_BACKWARD,
    FURTHER_FORWARD,
    GRADIENTS,
    OVERFLOW,
    Collective,
    Role,
    Setting,
    Tensor,
    Volume,
    gathered,
    over_steps,
    padded,
)
from harness.theory.expected.sharded import (
    KEPT_BY_EVALUATION,
    Sizes,
    across_replicas,
    norm,
    reduce_dtype,
    shard_role,
)

ALIGNMENT_BYTES = 16
"""`_get_aligned_numel` (_flat_param.py): addresses of original parameters within a flat one."""
ROOT_KEPT = "the root unit is not resharded after the forward pass"


@dataclass(frozen=True, kw_only=True)
class Fsdp1:
    """One sharding strategy: `reshard` tells whether blocks give their weights back after forward."""

    setting: Setting
    reshard: bool

    @property
    def role(self) -> Role:
        return shard_role(self.setting)

    @property
    def reduce_dtype(self) -> str:
        """`_init_param_reduce_dtypes` (_flat_param.py)."""
        return reduce_dtype(self.setting)

    def sizes(self, kept: bool | None = None) -> Sizes:
        """(elements, elements of the flat parameter) of each unit; the root keeps its weights."""
        return [
            flat_size(tensors, self.setting.shard_size, self.setting.compute_dtype)
            for name, tensors in self.setting.units()
            if kept is None or (not self.reshard or not name) is kept
        ]

    def volume(self) -> Volume:
        setting = self.setting
        found = over_steps(setting, self._step)
        if setting.evaluation_passes:
            found += self._evaluation()
        if setting.digest:
            found += self._digest()
        remarks = [(BACKWARD, ROOT_KEPT)] if self.reshard else []
        if setting.evaluation_spells:
            remarks.append((FORWARD, KEPT_BY_EVALUATION))
        return Volume(collectives=tuple(found), remarks=tuple(remarks))

    def _step(self, setting: Setting, step: int) -> list[Collective]:
        """Under `no_sync` nothing is reduced, and `_should_free_in_backward` (_runtime_utils.py) frees the
        weights only where the strategy reshards after forward: the others gather once per step."""
        dtype, further = setting.compute_dtype, setting.accumulation_steps - 1
        first = self.sizes(kept=False) if setting.follows_evaluation(step) else self.sizes()
        again = further if self.reshard else 0
        found = [
            *gathered("forward", FORWARD, first, dtype, role=self.role),
            *gathered("forward", FURTHER_FORWARD, self.sizes(), dtype, role=self.role, passes=again),
            *gathered("backward", BACKWARD, self.sizes(kept=False), dtype, role=self.role),
            *gathered(
                "backward", FURTHER_BACKWARD, self.sizes(kept=False), dtype, role=self.role, passes=further
            ),
            *gathered(
                "backward", GRADIENTS, self.sizes(), self.reduce_dtype, op="reduce_scatter", role=self.role
            ),
        ]
        if self.role == "shard":
            # `_reduce_grad` (_runtime_utils.py), over `_inter_node_pg`.
            found += across_replicas(setting, self.sizes())
        return found + norm_and_overflow(setting, self.role)

    def _evaluation(self) -> list[Collective]:
        """Kept units are gathered by the first pass of an evaluation and stay."""
        setting, dtype = self.setting, self.setting.compute_dtype
        return [
            *gathered(
                "evaluation",
                FORWARD,
                self.sizes(kept=False),
                dtype,
                role=self.role,
                passes=setting.evaluation_passes,
            ),
            *gathered(
                "evaluation",
                FORWARD,
                self.sizes(kept=True),
                dtype,
                role=self.role,
                passes=setting.evaluation_spells,
            ),
        ]

    def _digest(self) -> list[Collective]:
        """`summon_full_params` gathers every unit in the dtype of the masters."""
        dtype = self.setting.master_dtype
        return gathered("digest", "weights gathered for their digest", self.sizes(), dtype, role=self.role)


def norm_and_overflow(setting: Setting, role: Role) -> list[Collective]:
    """What precedes the update."""
    return [norm(role), *overflow(setting)]


def overflow(setting: Setting) -> list[Collective]:
    """`ShardedGradScaler.unscale_` reduces its flag over its process group, by default the world."""
    if setting.precision != "fp16-mixed":
        return []
    return [Collective(phase="step", op="all_reduce", dtype="float32", term=OVERFLOW, payload_bytes=4)]


def flat_size(tensors: list[Tensor], shards: int, dtype: str) -> tuple[int, int]:
    """Elements of a unit and of its flat parameter.

    `FlatParamHandle._init_flat_param_and_metadata` (_flat_param.py) aligns every parameter to 16 bytes of
    the dtype that it is gathered in, and the end to the ranks of the group.
    """
    aligned = ALIGNMENT_BYTES // DTYPE_BYTES[dtype]
    flat = 0
    for tensor in tensors:
        flat = padded(flat, aligned) + tensor.numel
    return sum(tensor.numel for tensor in tensors), padded(flat, shards)


def fsdp1_volume(setting: Setting) -> Volume:
    """FULL_SHARD and HYBRID_SHARD; on one rank FSDP1 falls back to NO_SHARD (`_init_core_state`)."""
    if setting.world_size == 1:
        return fsdp1_no_shard_volume(setting)
    return Fsdp1(setting=setting, reshard=True).volume()


def fsdp1_kept_volume(setting: Setting) -> Volume:
    """SHARD_GRAD_OP."""
    if setting.world_size == 1:
        return fsdp1_no_shard_volume(setting)
    return Fsdp1(setting=setting, reshard=False).volume()


def fsdp1_no_shard_volume(setting: Setting) -> Volume:
    """NO_SHARD all-reduces the flat gradient of each unit once per step (`_reduce_grad_no_shard`)."""
    strategy = Fsdp1(setting=setting, reshard=False)
    sizes = [flat_size(tensors, setting.world_size, setting.compute_dtype) for _, tensors in setting.units()]

    def step(setting: Setting, _: int) -> list[Collective]:
        reduced = gathered("backward", GRADIENTS, sizes, strategy.reduce_dtype, op="all_reduce")
        return reduced + overflow(setting)

    return Volume(collectives=tuple(over_steps(setting, step)))
