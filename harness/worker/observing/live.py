"""Recognises the strategy of a live model and reads it through the engine of the backend that runs the same.

The engines only describe here: a script trains by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from harness.backends.base import Batch, Effective, Engine, SetupContext, World
from harness.backends.ddp import DdpEngine
from harness.backends.torch_engine import Strategy, TorchEngine
from harness.worker.observing import live_sharded


@dataclass(frozen=True, kw_only=True)
class Live:
    """What trains in a script."""

    engine: Engine
    """Describes states and settings; it does not train."""
    bare: nn.Module
    """The model without what wraps it."""
    base: str | None
    """The built-in backend of the same strategy; None: there is none."""
    note: str | None = None
    """What a reader must know of the strategy."""
    cuts_units: bool = False
    """Whether weights are gathered in units of the model."""

    @property
    def has_form(self) -> bool:
        """Whether the closed forms of the backend hold: they know no units within units."""
        units = [f"{name}." for name in self.engine.effective().wrap_units if name]
        return not any(a != b and a.startswith(b) for a in units for b in units)


@dataclass
class Optimizers:
    """The optimizers that step, as one."""

    each: list[torch.optim.Optimizer] = field(default_factory=list)

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for one in self.each for key, value in one.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.each for group in one.param_groups]

    @property
    def name(self) -> str:
        """Their classes with the modules."""
        return " and ".join(
            dict.fromkeys(f"{type(one).__module__}.{type(one).__name__}" for one in self.each)
        )


def recognise(
    roots: Sequence[nn.Module], optimizers: Optimizers, world: World, *, clipping: float | None,
    micro_batch_size: int, accumulation_steps: int, autocast: torch.dtype | None,
) -> Live:  # fmt: skip
    """The strategy of the largest module that the script calls."""
    context = SetupContext(
        world=world,
        # Autocast alone follows from it in what is read here.
        precision={torch.bfloat16: "bf16-mixed", torch.float16: "fp16-mixed"}.get(autocast, "fp32"),  # type: ignore[arg-type]
        gradient_clipping=clipping,
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        preset="library-defaults",
        compute_loss=_never,
    )
    root = max(roots, key=lambda module: sum(p.numel() for p in module.parameters()))
    for module in root.modules():
        if type(module).__name__ == "DeepSpeedEngine":
            return _zero(module, context)
        if isinstance(module, DistributedDataParallel):
            return _ddp(module, optimizers, context)
        if isinstance(module, FullyShardedDataParallel):
            engine, base = live_sharded.fsdp1(module, optimizers, context)
            return Live(engine=engine, bare=module.module, base=base, cuts_units=True)
        if isinstance(module, FSDPModule):
            engine, base = live_sharded.fsdp2(root, optimizers, context)
            return Live(engine=engine, bare=root, base=base, cuts_units=True)
    return _single(root, optimizers, context)


def effective_of(live: Live, optimizers: Optimizers, accumulation: int) -> Effective:
    """What really runs, with the optimizers that were seen to step."""
    effective = live.engine.effective()
    return dataclasses.replace(
        effective, optimizer=optimizers.name or effective.optimizer, accumulation_steps=accumulation
    )


def _ddp(ddp: DistributedDataParallel, optimizers: Optimizers, context: SetupContext) -> Live:
    dtype = next(ddp.parameters()).dtype
    strategy = Strategy(
        name="DistributedDataParallel",
        native_config={
            "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
            "bucket_bytes_cap": ddp.bucket_bytes_cap,
            "find_unused_parameters": ddp.find_unused_parameters,
            "static_graph": ddp.static_graph,
            "broadcast_buffers": ddp.broadcast_buffers,
        },
        wrap_units=[""],
        reduce_dtype=dtype,
        parameter_count=sum(parameter.numel() for parameter in ddp.parameters()),
        compute_dtype=dtype,
        autocast=True,
        offload=[],
        reduce_bucket_bytes=ddp.bucket_bytes_cap,
        details={"gradient_as_bucket_view": ddp.gradient_as_bucket_view},
    )
    return Live(engine=DdpEngine(ddp, optimizers, context, strategy), bare=ddp.module, base="ddp")  # type: ignore[arg-type]


def _single(root: nn.Module, optimizers: Optimizers, context: SetupContext) -> Live:
    dtype = next(root.parameters()).dtype
    several = context.world.world_size > 1
    strategy = Strategy(
        name="several processes without gradient synchronisation" if several else "single process",
        native_config={},
        wrap_units=[""],
        reduce_dtype=None,
        parameter_count=sum(parameter.numel() for parameter in root.parameters()),
        compute_dtype=dtype,
        autocast=True,
        offload=[],
        details={},
    )
    note = None
    if several:
        note = (
            f"{context.world.world_size} processes train and nothing wraps the model: unless the script "
            "reduces gradients itself, each trains a model of its own"
        )
    base = None if several else "single"
    return Live(engine=TorchEngine(root, optimizers, context, strategy), bare=root, base=base, note=note)  # type: ignore[arg-type]


def _zero(module: nn.Module, context: SetupContext) -> Live:
    from harness.worker.observing.live_zero import zero

    engine, base = zero(module, context)
    bare: Any = module.module
    return Live(engine=engine, bare=bare, base=base)


def _never(_module: nn.Module, _batch: Batch) -> Tensor:
    raise AssertionError("the engine of an observed script does not train")
