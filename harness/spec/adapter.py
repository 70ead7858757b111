"""The adapter of a job: what is trained where the model's own weights are frozen."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from harness.spec.section import Section

ALL_LINEAR = "all-linear"
ADAPTER_NAME = "default"
"""What peft calls an adapter that has no name of its own; a part of parameters' names."""


class AdapterSection(Section):
    """Low-rank adapters (peft's LoRA): they alone are trained, all other weights are frozen."""

    kind: Literal["none", "lora"] = Field(
        "none", description="none: all weights are trained; lora: low-rank adapters on a frozen model"
    )
    rank: PositiveInt = Field(8, description="rank of each adapter")
    alpha: PositiveFloat = Field(16.0, description="adapters are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="probability of dropout before each adapter")
    targets: list[str] | None = Field(
        None,
        description="names, or ends of names, of the linear layers that get an adapter; [all-linear] for all "
        "but the output layer. Default: peft's choice for the model's type",
    )
    base_dtype: Literal["fp32", "bf16", "nf4"] | None = Field(
        None,
        description="dtype of frozen weights where the library does not cast them. Default: as "
        "`training.precision` has the weights of a job without adapter. nf4: linear layers in 4 bits (QLoRA)",
    )

    @model_validator(mode="after")
    def _settings_take_effect(self) -> AdapterSection:
        given = sorted(self.model_fields_set - {"kind"})
        given = [name for name in given if getattr(self, name) != type(self).model_fields[name].default]
        if self.kind == "none" and given:
            raise ValueError(f"`{given[0]}` would be ignored without an adapter; set `kind: lora`")
        if self.targets is not None and not self.targets:
            raise ValueError("`targets` is empty; name at least one layer, or write null for peft's choice")
        if self.targets and ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(f"`targets` is either [{ALL_LINEAR}] or names of layers")
        return self

    @property
    def is_quantised(self) -> bool:
        return self.base_dtype == "nf4"

    @property
    def is_present(self) -> bool:
        return self.kind not in (None, "none")  # None: an observed script that does not show it
