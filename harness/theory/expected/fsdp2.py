"""fully_shard (FSDP2) of torch 2.13, on one and two-dimensional meshes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from harness.theory.expected.setting import (
    BACKWARD,
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

ROOT_KEPT = "the root unit stays gathered between forward and backward pass (reshard_after_forward: None)"


@dataclass(frozen=True, kw_only=True)
class Fsdp2:
    """Which units give their gathered weights back after the forward pass."""

    setting: Setting
    reshard_blocks: bool
    reshard_root: bool

    @property
    def role(self) -> Role:
        return shard_role(self.setting)

    @property
    def reduce_dtype(self) -> str:
        """`foreach_reduce` (_fsdp_collectives.py)."""
        return reduce_dtype(self.setting)

    def sizes(self, kept: bool | None = None) -> Sizes:
        """(elements, padded elements) of each unit; only of those that keep or give back their weights."""
        return [
            unit_size(tensors, self.setting.shard_size)
            for name, tensors in self.setting.units()
            if kept is None or self._kept(name) is kept
        ]

    def volume(self) -> Volume:
        setting = self.setting
        found = over_steps(setting, self._step) if setting.world_size > 1 else self._norms()
        if setting.world_size > 1:
            found += self._evaluation() + self._digest()
        remarks = []
        if self.reshard_blocks and not self.reshard_root:
            remarks.append((BACKWARD, ROOT_KEPT))
        if setting.evaluation_spells and not self.reshard_root:
            remarks.append((FORWARD, KEPT_BY_EVALUATION))
        return Volume(collectives=tuple(found), remarks=tuple(remarks))

    def _kept(self, unit: str) -> bool:
        return not (self.reshard_blocks if unit else self.reshard_root)

    def _step(self, setting: Setting, step: int) -> list[Collective]:
        """Weights are gathered in every micro-step, since the backward pass gives them back
        (`FSDPParamGroup.post_backward`), gradients reduced in the last one only
        (`set_requires_gradient_sync`)."""
        weights, further = setting.compute_dtype, setting.accumulation_steps - 1
        # After an evaluation, units that are not resharded are still gathered.
        first = self.sizes(kept=False) if setting.follows_evaluation(step) else self.sizes()
        found = [
            *gathered("forward", FORWARD, first, weights, role=self.role),
            *gathered("forward", FURTHER_FORWARD, self.sizes(), weights, role=self.role, passes=further),
            *gathered("backward", BACKWARD, self.sizes(kept=False), weights, role=self.role),
            *gathered(
                "backward", FURTHER_BACKWARD, self.sizes(kept=False), weights, role=self.role, passes=further
            ),
            *gathered(
                "backward", GRADIENTS, self.sizes(), self.reduce_dtype, op="reduce_scatter", role=self.role
            ),
        ]
        if self.role == "shard":
            # `foreach_reduce` (_fsdp_collectives.py).
            found += across_replicas(setting, self.sizes())
        return found + self._norm()

    def _norm(self) -> list[Collective]:
        found = [norm(self.role)]
        if self.setting.precision == "fp16-mixed":
            found.append(_overflow(self.role))
        return found

    def _norms(self) -> list[Collective]:
        """A group of one rank: nothing is gathered or reduced (`FSDPParamGroup.unshard`), the norm is."""
        return [collective for _ in self.setting.steps for collective in self._norm()]

    def _evaluation(self) -> list[Collective]:
        """A forward pass gathers what is not gathered already; without a backward pass kept units stay."""
        setting, dtype = self.setting, self.setting.compute_dtype
        if not setting.evaluation_passes:
            return []
        again = setting.evaluation_passes
        return [
            *gathered("evaluation", FORWARD, self.sizes(kept=False), dtype, role=self.role, passes=again),
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
        """`DTensor.full_tensor` of every parameter, in the dtype of the masters."""
        if not self.setting.digest:
            return []
        sizes = [unit_size([tensor], self.setting.shard_size) for tensor in self.setting.parameters]
        dtype = self.setting.master_dtype
        return gathered("digest", "weights gathered for their digest", sizes, dtype, role=self.role)


def _overflow(role: Role) -> Collective:
    """GradScaler's flag, reduced by the operator's DTensor rule (`torch/distributed/tensor/_ops`)."""
    return Collective(
        phase="step", op="all_reduce", dtype="float32", term=OVERFLOW, payload_bytes=4, role=role
    )


def unit_size(tensors: list[Tensor], shards: int) -> tuple[int, int]:
    """Elements of a unit, and with every parameter padded along its first dimension to whole shards.

    `FSDPParam._init_sharded_param` (_fsdp_param.py) and `_get_dim0_padded_size` (_fsdp_common.py).
    """
    whole = sum(
        padded(tensor.shape[0], shards) * prod(tensor.shape[1:]) if tensor.shape else shards
        for tensor in tensors
    )
    return sum(tensor.numel for tensor in tensors), whole


def fsdp2_volume(setting: Setting) -> Volume:
    """`backends/fsdp2.py`: the root follows the blocks like for like; else torch keeps it gathered."""
    return Fsdp2(setting=setting, reshard_blocks=True, reshard_root=setting.like_for_like).volume()


def fsdp2_kept_volume(setting: Setting) -> Volume:
    """No unit is resharded after the forward pass."""
    return Fsdp2(setting=setting, reshard_blocks=False, reshard_root=False).volume()
