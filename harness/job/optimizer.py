"""What updates the weights: the optimizer, its groups, and its learning rate over steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, field_validator, model_validator

from harness.backends.base import OptimizerImplementation, OptimizerKind
from harness.backends.optimizer.kinds import LOW_BIT, OF_TORCH, NewtonSchulz
from harness.errors import JobError
from harness.job.model import Factory, SettingsSection, arguments_field, factory_field, later_setting


@dataclass(frozen=True, kw_only=True)
class UpdateGroup:
    """Parameters that are updated with the same constants; a group of the optimizer."""

    names: frozenset[str]
    weight_decay: float
    rate: float = 1.0
    """Its learning rate over the job's."""


class GroupSection(SettingsSection):
    """Parameters whose names match a pattern, and what of the optimizer's constants is their own."""

    parameters: str = Field(
        min_length=1,
        description="pattern of names as in the model, such as *.bias or model.embed_tokens.*; * stands for "
        "any text, dots included. A parameter is in the first group that matches",
    )
    learning_rate: PositiveFloat | None = Field(
        None, description="peak learning rate, shaped by the schedule as the others'; null: the job's"
    )
    weight_decay: NonNegativeFloat | None = Field(
        None,
        description="weight decay of all these parameters; null: by `optimizer.weight_decay` and `decay`",
    )
    frozen: bool = Field(False, description="whether they keep their initial values")

    @model_validator(mode="after")
    def _says_something(self) -> GroupSection:
        own = self.learning_rate is not None or self.weight_decay is not None
        if self.frozen and own:
            raise ValueError("`frozen` parameters have no `learning_rate` or `weight_decay`; leave these out")
        if not (self.frozen or own):
            raise ValueError("give `learning_rate`, `weight_decay` or `frozen: true`")
        return self


ADAMS = tuple(kind for kind in get_args(OptimizerKind) if kind not in ("sgd", "own"))
EFFECTIVE: dict[str, tuple[str, ...]] = {
    "implementation": OF_TORCH, "newton_schulz": ("muon",), "momentum": ("sgd",), "arguments": ("own",),
    **dict.fromkeys(("beta1", "beta2", "epsilon"), ADAMS),
}  # fmt: skip
"""Settings that only some kinds have."""


SPELLINGS = {
    "adam8bit": "adamw-8bit", "adamw8bit": "adamw-8bit", "adamwtorch8bit": "adamw-8bit",
    "adamwbnb8bit": "adamw-8bit-bnb", "adamw8bitbnb": "adamw-8bit-bnb", "bnbadamw8bit": "adamw-8bit-bnb",
    "adamwtorch": "adamw", "adamwhf": "adamw",
}  # fmt: skip
"""Of kinds, by what other tools call them, without case and separators."""
NOT_OFFERED = {
    "adafactor": "Adafactor", "lion": "Lion", "lion8bit": "Lion", "pagedlion8bit": "Lion", "lamb": "LAMB",
    "adagrad": "Adagrad", "rmsprop": "RMSprop", "galore": "GaLore", "shampoo": "Shampoo", "soap": "SOAP",
}  # fmt: skip
"""What people ask for that no kind is, by its spelling without case and separators."""


def kind_of(text: str) -> str:
    """The kind that a name stands for, or the name. Raises ValueError for an optimizer that no kind is."""
    plain = "".join(letter for letter in text.lower() if letter.isalnum())
    if plain in NOT_OFFERED:
        raise ValueError(
            f"{NOT_OFFERED[plain]} is not among the optimizers; give one of your own with optimizer.kind=own "
            "and optimizer.factory, whose states are measured and not predicted, or adamw-8bit"
        )
    if plain.startswith("paged"):
        raise ValueError(
            "paged states, which move to host memory where the device is full, are not offered; "
            "adamw-8bit-bnb is bitsandbytes' without pages"
        )
    return SPELLINGS.get(plain, text)


class OptimizerSection(SettingsSection):
    """AdamW or another optimizer, every constant explicit."""

    kind: OptimizerKind = later_setting(
        "adamw",
        description="adamw: torch's, moments in the dtype of the weights that it updates; adam and sgd: "
        "torch's, which add weight decay to gradients; adamw-8bit: torchao's, moments in blocks of 256 with "
        "8 bits each (needs the extra low-bit); adamw-8bit-bnb: bitsandbytes', likewise (extra qlora); muon: "
        "matrices of blocks by Muon, updates scaled to the size of AdamW's, everything else by AdamW; own: "
        "what `factory` returns",
    )
    factory: Factory | None = factory_field(
        "an optimizer of `groups`, given by that name: a list of params, lr and weight_decay"
    )
    arguments: dict[str, Any] = arguments_field()
    newton_schulz: NewtonSchulz = later_setting(
        "fp32",
        description="precision in which Muon orthogonalises; bf16 is what torch.optim.Muon does",
    )
    learning_rate: PositiveFloat = Field(1e-3, description="peak learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    epsilon: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    momentum: float = later_setting(
        0.0,
        ge=0,
        lt=1,
        description="of `kind: sgd`; 0: it keeps no states",
    )
    weight_decay: NonNegativeFloat = Field(
        0.1, description="weight decay; decoupled from gradients but for adam and sgd"
    )
    decay: Literal["matrices", "all"] = Field(
        "matrices", description="parameters that decay: those with two dimensions or more, or all"
    )
    groups: list[GroupSection] = later_setting(
        [],
        description="parameters with a learning rate or weight decay of their own, or frozen ones; the "
        "others have the settings above",
    )
    implementation: OptimizerImplementation = later_setting(
        "default",
        description=(
            "torch's code for the update: one tensor at a time (for-loop), all at once (foreach) or in one "
            "kernel (fused); default: torch's choice, foreach on CUDA and for-loop on the CPU"
        ),
    )

    @field_validator("kind", mode="before")
    @classmethod
    def _as_spelled_elsewhere(cls, kind: object) -> object:
        return kind_of(kind) if isinstance(kind, str) else kind

    @model_validator(mode="before")
    @classmethod
    def _factory_is_own(cls, values: Any) -> Any:
        has_factory = isinstance(values, dict) and values.get("factory") is not None
        return {"kind": "own", **values} if has_factory else values

    @model_validator(mode="after")
    def _settings_take_effect(self) -> OptimizerSection:
        if (self.kind == "own") != (self.factory is not None):
            raise ValueError("`factory` and `kind: own` need each other; give both or neither")
        for key, kinds in EFFECTIVE.items():
            if self.kind not in kinds and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"`{key}` would be ignored by `kind: {self.kind}`; leave it out")
        return self

    def update_groups(self, dimensions: Mapping[str, int]) -> tuple[UpdateGroup, ...]:
        """Groups of the trained parameters: those that decay, then the rest, then the same of each of
        `groups`; any may be empty.

        dimensions: of each trained parameter of the whole model, since shards lose theirs.
        """
        decaying = frozenset(name for name, count in dimensions.items() if self.decay == "all" or count >= 2)
        place = self.places(dimensions)
        found = []
        for index in (None, *range(len(self.groups))):
            names = frozenset(name for name in dimensions if place.get(name) == index)
            own = GroupSection.model_construct(parameters="*") if index is None else self.groups[index]
            decays = (self.weight_decay, 0.0) if own.weight_decay is None else (own.weight_decay,) * 2
            rate = (own.learning_rate or self.learning_rate) / self.learning_rate
            pair = zip((names & decaying, names - decaying), decays, strict=True)
            found += [UpdateGroup(names=part, weight_decay=decay, rate=rate) for part, decay in pair]
        return tuple(found)

    @property
    def freezes(self) -> bool:
        """Whether any of its groups keeps its values."""
        return any(group.frozen for group in self.groups)

    def places(self, names: Iterable[str]) -> dict[str, int]:
        """Which of `groups` a parameter is in, of those that are in any."""
        matching = ((n, i) for n in names for i, g in enumerate(self.groups) if fnmatchcase(n, g.parameters))
        return dict(reversed(list(matching)))

    def frozen_among(self, names: Iterable[str]) -> frozenset[str]:
        """The parameters that `groups` freeze. Raises JobError for a group without any parameter."""
        every = list(names)
        place = self.places(every)
        for index, group in enumerate(self.groups):
            if index not in place.values():
                matched = any(fnmatchcase(name, group.parameters) for name in every)
                why = (
                    "earlier groups have all that it matches" if matched else "it matches none of the model's"
                )
                raise JobError(
                    f"optimizer.groups: '{group.parameters}' has no parameters: {why}; names are like "
                    f"'{every[0]}' and '{every[-1]}'"
                )
        return frozenset(name for name, index in place.items() if self.groups[index].frozen)

    def for_closed_forms(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a `Workload`; `single:states=fp32` has states of full width."""
        runs = self.at_full_width() if options.get("states") == "fp32" else self
        return {
            "optimizer": runs.kind,
            "newton_schulz": self.newton_schulz,
            "momentum": self.momentum,
            "optimizer_implementation": self.implementation,
        }

    @property
    def moments(self) -> int:
        """Values that the optimizer keeps per weight, as Adam keeps two."""
        return (1 if self.momentum else 0) if self.kind == "sgd" else 2

    @property
    def rounds_states(self) -> bool:
        """Whether the update itself rounds to fewer bits than the weights have."""
        return self.kind in LOW_BIT or self.newton_schulz == "bf16"

    def at_full_width(self) -> OptimizerSection:
        """The same without that rounding."""
        kind: OptimizerKind = "adamw" if self.kind in LOW_BIT else self.kind
        return self.model_copy(update={"kind": kind, "newton_schulz": "fp32"})


class ScheduleSection(SettingsSection):
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
    scheduler: str | None = later_setting(
        None,
        description="of `kind: deepspeed`: a scheduler of DeepSpeed, such as WarmupLR, or of torch",
    )
    parameters: dict[str, Any] = later_setting(
        {},
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
