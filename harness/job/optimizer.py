"""What updates the weights: the optimizer, its groups, and its learning rate over steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from harness.backends.base import OptimizerImplementation, OptimizerKind
from harness.backends.optimizer_kinds import LOW_BIT, NewtonSchulz
from harness.job.model import Section


@dataclass(frozen=True, kw_only=True)
class UpdateGroup:
    """Parameters that are updated with the same constants; a group of the optimizer."""

    names: frozenset[str]
    weight_decay: float


class OptimizerSection(Section):
    """AdamW, or Muon beside it, every constant explicit."""

    kind: OptimizerKind = Field(
        "adamw",
        # Documents of earlier jobs stay as they are.
        exclude_if=lambda value: value == "adamw",
        description="adamw: torch's, moments in the dtype of the weights that it updates; adamw-8bit: "
        "torchao's, moments in blocks of 256 with 8 bits each (needs the extra low-bit); adamw-8bit-bnb: "
        "bitsandbytes', likewise (extra qlora); muon: matrices of blocks by Muon, updates scaled to the "
        "size of AdamW's, everything else by AdamW",
    )
    newton_schulz: NewtonSchulz = Field(
        "fp32",
        # Documents of earlier jobs stay as they are.
        exclude_if=lambda value: value == "fp32",
        description="precision in which Muon orthogonalises; bf16 is what torch.optim.Muon does",
    )
    learning_rate: PositiveFloat = Field(1e-3, description="peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    epsilon: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegativeFloat = Field(0.1, description="decoupled weight decay")
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="parameters that decay: those with two dimensions or more, or all"
    )
    implementation: OptimizerImplementation = Field(
        "default",
        # Documents of earlier jobs stay as they are.
        exclude_if=lambda value: value == "default",
        description=(
            "torch's code for the update: one tensor at a time (for-loop), all at once (foreach) or in one "
            "kernel (fused); default: torch's choice, foreach on CUDA and for-loop on the CPU"
        ),
    )

    @model_validator(mode="after")
    def _settings_take_effect(self) -> OptimizerSection:
        if self.kind != "adamw" and self.implementation != "default":
            raise ValueError(f"`implementation` would be ignored by `kind: {self.kind}`; leave it out")
        if self.kind != "muon" and self.newton_schulz != "fp32":
            raise ValueError(f"`newton_schulz` would be ignored by `kind: {self.kind}`; leave it out")
        return self

    def update_groups(self, dimensions: Mapping[str, int]) -> tuple[UpdateGroup, ...]:
        """Groups of the trained parameters: those that decay, then the rest; either may be empty.

        dimensions: of each trained parameter of the whole model, since shards lose theirs.
        """
        decaying = frozenset(name for name, count in dimensions.items() if self.decay == "all" or count >= 2)
        return (
            UpdateGroup(names=decaying, weight_decay=self.weight_decay),
            UpdateGroup(names=frozenset(dimensions) - decaying, weight_decay=0.0),
        )

    @property
    def rounds_states(self) -> bool:
        """Whether the update itself rounds to fewer bits than the weights have."""
        return self.kind in LOW_BIT or self.newton_schulz == "bf16"

    def at_full_width(self) -> OptimizerSection:
        """The same without that rounding."""
        kind: OptimizerKind = "muon" if self.kind == "muon" else "adamw"
        return self.model_copy(update={"kind": kind, "newton_schulz": "fp32"})


class ScheduleSection(Section):
    """The learning rate over steps."""

    kind: Literal["constant", "linear", "cosine", "deepspeed"] = Field(
        "cosine",
        description="shape after the warm-up, down to `final_fraction` at the last step; deepspeed: the "
        "rates of `scheduler`, as the installed DeepSpeed computes them",
    )
    warmup_steps: NonNegativeInt = Field(2, description="steps of linear rise from 0 to the peak")
    final_fraction: float = Field(
        0.1, ge=0, le=1, description="last learning rate over the peak (linear, cosine)"
    )
    scheduler: str | None = Field(
        None,
        # Documents of earlier jobs stay as they are.
        exclude_if=lambda value: value is None,
        description="of `kind: deepspeed`: a scheduler of DeepSpeed, such as WarmupLR, or of torch",
    )
    parameters: dict[str, Any] = Field(
        {},
        exclude_if=lambda value: not value,
        description="of `kind: deepspeed`: its arguments. Absent ones have the library's defaults; auto: "
        "warmup_min_lr is 0, warmup_max_lr the learning rate, warmup_num_steps `warmup_steps`, "
        "total_num_steps the steps of the training",
    )

    @model_validator(mode="after")
    def _scheduler_takes_effect(self) -> ScheduleSection:
        if (self.scheduler is not None) != (self.kind == "deepspeed"):
            raise ValueError("`scheduler` and `kind: deepspeed` need each other; give both or neither")
        if self.parameters and self.scheduler is None:
            raise ValueError("`parameters` are those of `scheduler`, which is not given; leave them out")
        return self
