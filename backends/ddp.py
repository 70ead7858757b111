"""torch DistributedDataParallel: every rank holds everything, gradients are all-reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from backends.base import Backend, BuildModel, BuildOptimizer, Engine, SetupContext
from backends.blocks import parameter_count
from backends.options import NoOptions
from backends.presets import ddp_changes
from backends.single import grad_scaler
from backends.torch_engine import Strategy, TorchEngine


class DdpBackend(Backend):
    """DDP with autocast; gradients cross the wire in the dtype of the weights."""

    Options = NoOptions

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        model = build_model()
        count = parameter_count(model)
        device = torch.device(context.world.device)
        if device.type == "cuda":
            device = torch.device("cuda", context.world.local_rank)
        model.to(device)
        arguments: dict[str, Any] = {c.setting: c.value for c in ddp_changes(context.preset)}
        ddp = DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None, **arguments
        )
        strategy = Strategy(
            name="DistributedDataParallel",
            native_config=arguments,
            wrap_units=[""],
            reduce_dtype=next(model.parameters()).dtype,
            parameter_count=count,
            compute_dtype=next(model.parameters()).dtype,
            autocast=True,
            offload=[],
            reduce_bucket_bytes=ddp.bucket_bytes_cap,
            details={
                "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
            },
            skip_synchronisation=ddp.no_sync,
        )
        optimizer = build_optimizer(model.named_parameters())
        return TorchEngine(ddp, optimizer, context, strategy, grad_scaler(context))
