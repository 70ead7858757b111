"""One process that trains on the whole global batch: the reference that every strategy is judged by."""

from __future__ import annotations

from dataclasses import replace

import torch

from harness.backends.base import (
    Backend,
    BackendOptions,
    BuildModel,
    BuildOptimizer,
    Engine,
    SetupContext,
    World,
)
from harness.backends.blocks import first_trained, parameter_count
from harness.backends.cast_engine import CastEngine
from harness.backends.options import SingleOptions
from harness.backends.partial_sums import add_up_parts
from harness.backends.precision import compute_dtype, scaler_arguments
from harness.backends.reordered import reorder_backward
from harness.backends.torch_engine import Strategy, TorchEngine


class SingleBackend(Backend):
    """No distribution at all."""

    Options = SingleOptions

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)

    def unmet_requirements(self, world: World) -> list[str]:
        if world.world_size == 1:
            return []
        return [f"'single' is one process, this world has {world.world_size} ranks"]

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        model = build_model()
        precision = getattr(self.options, "precision", None)
        if precision == "fp32":
            context = replace(context, precision="fp32")
            model.float()
        cast = precision == "cast" and context.precision.endswith("-mixed")
        if getattr(self.options, "backward", None) == "reordered":
            reorder_backward(model)
        if (parts := getattr(self.options, "partial_sums", None)) is not None:
            add_up_parts(model, parts)
        count = parameter_count(model)
        model.to(context.world.device)
        strategy = Strategy(
            name="single process",
            native_config={},
            wrap_units=[""],
            reduce_dtype=None,
            parameter_count=count,
            compute_dtype=compute_dtype(context.precision) if cast else first_trained(model).dtype,
            autocast=not cast,
            offload=[],
            details={},
            fp32_norm=getattr(self.options, "norm", None) == "fp32",
        )
        engine_class = CastEngine if cast else TorchEngine
        return engine_class(
            model,
            build_optimizer(model.named_parameters()),
            context,
            strategy,
            grad_scaler(context),
        )


def grad_scaler(context: SetupContext) -> torch.amp.GradScaler | None:
    """The dynamic loss scaler of fp16-mixed; None at every other precision."""
    if context.precision != "fp16-mixed":
        return None
    return torch.amp.GradScaler(context.world.device, **scaler_arguments(context.loss_scale))  # type: ignore[arg-type]
