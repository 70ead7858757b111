"""torch DistributedDataParallel: every rank holds everything, gradients are all-reduced."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.backends import base
from harness.backends.model.blocks import first_trained, parameter_count
from harness.backends.model.loading import this_device
from harness.backends.model.precision import grad_scaler
from harness.backends.options import DdpOptions, reduces_each
from harness.backends.presets import ddp_changes
from harness.backends.torch_engine import TorchEngine, TorchStrategy


class DdpEngine(TorchEngine):
    """Accounts for the buckets that DDP's reducer (C++) holds in addition to the gradients."""

    def rehearse(self, batch: base.Batch) -> None:
        """DDP lays out its buckets anew after its first backward pass.

        The order in which a ring adds values depends on the place of an element in its bucket, so a resumed
        run is exact only if it begins with the layout that the saved run had.
        """
        self.context.compute_loss(self.module, batch).backward()
        self.module.zero_grad(set_to_none=True)

    def hidden_bytes(self) -> dict[base.TensorKind, int]:
        """Bytes of the buckets, unless the gradients are views of them just now.

        torch lets nobody reach the buckets; `Logger` has their sizes from the reducer (torch 2.13,
        `csrc/distributed/c10d/logger.cpp`). Also with `gradient_as_bucket_view` gradients of micro-steps
        that are not reduced lie outside the buckets, and between an update and the next reduction the
        buckets are there while gradients are not.
        """
        ddp = self.module
        if not isinstance(ddp, DistributedDataParallel):
            return {}
        in_buckets = self._micro_steps == 0 or self.strategy.reduces_each
        reduced = in_buckets and any(p.grad is not None for p in ddp.parameters())
        if ddp.gradient_as_bucket_view and reduced:
            return {}
        sizes = str(ddp._get_ddp_logging_data()["bucket_sizes"]).split(",")
        return {"communication": sum(int(size) for size in sizes if size.strip())}


class DdpBackend(base.Backend):
    """DDP with autocast; gradients cross the wire in the dtype of the weights."""

    Options: ClassVar[type[base.BackendOptions]] = DdpOptions
    engine_class: ClassVar[type[DdpEngine]] = DdpEngine

    def prepare(
        self, build_model: base.BuildModel, build_optimizer: base.BuildOptimizer, context: base.SetupContext
    ) -> base.Engine:
        each = reduces_each(self.options)
        if getattr(self.options, "static_graph", False) and context.accumulation_steps > 1 and not each:
            raise base.Unsupported(
                f"static_graph with accumulation: a first micro-step under no_sync fails in DDP's reducer "
                f"(torch {torch.__version__}); leave static_graph out, or set sync_each_batch=true"
            )
        model = build_model()
        count = parameter_count(model)
        device = this_device(context.world)
        model.to(device)
        arguments: dict[str, Any] = {c.setting: c.value for c in ddp_changes(context.preset)}
        unused = ("find_unused_parameters", "static_graph")
        arguments |= {name: True for name in unused if getattr(self.options, name, False)}
        ddp = DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None, **arguments
        )
        strategy = ddp_strategy(ddp, arguments, count, reduces_each=each)
        optimizer = build_optimizer(model.named_parameters())
        return self.engine_class(ddp, optimizer, context, strategy, grad_scaler(context))


def ddp_strategy(module: nn.Module, config: dict[str, Any], count: int, **more: Any) -> TorchStrategy:
    """What a live DDP does, or a model that nothing wraps; `more`: fields that differ."""
    dtype = first_trained(module).dtype
    if isinstance(module, DistributedDataParallel):
        more = {
            "details": {"gradient_as_bucket_view": module.gradient_as_bucket_view},
            "reduce_bucket_bytes": module.bucket_bytes_cap,
            "skip_synchronisation": module.no_sync,
        } | more
    given: dict[str, Any] = {
        "name": type(module).__name__, "native_config": config, "wrap_units": [""], "reduce_dtype": dtype,
        "parameter_count": count, "compute_dtype": dtype, "autocast": True, "offload": [], "details": {},
    }  # fmt: skip
    return TorchStrategy(**given | more)
