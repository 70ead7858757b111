"""The loss of a job that brings its own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from harness.spec.factory import Factory, arguments_field, factory_field
from harness.spec.section import Section


class LossSection(Section):
    """The loss: the task's, or a function of your own."""

    factory: Factory | None = factory_field("the loss: a function of (model, batch) that returns a scalar")
    arguments: dict[str, Any] = arguments_field()
    reduction: Literal["sum", "mean"] = Field(
        "mean",
        description="what that function, or the model's own loss in task custom, returns of a batch: the sum "
        "over its targets or their mean",
    )
    targets: Literal["samples", "labels"] = Field(
        "samples",
        description="task custom: what the loss of a step is the mean over: samples, or labels that are not "
        "-100. Other tasks: labels of text, samples of classes",
    )

    chunk_tokens: PositiveInt | None = Field(
        None,
        # Documents of earlier jobs stay as they are.
        exclude_if=lambda value: value is None,
        description="task causal-lm: tokens whose logits are computed at once, and once more in the backward "
        "pass, for large vocabularies; null: those of all tokens",
    )

    @model_validator(mode="after")
    def _arguments_are_used(self) -> LossSection:
        if self.arguments and self.factory is None:
            raise ValueError("`arguments` need a `factory`")
        if self.chunk_tokens is not None and self.factory is not None:
            raise ValueError("`chunk_tokens` would be ignored by a `factory`; remove one of them")
        return self
