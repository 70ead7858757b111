"""Recognises the strategy of a live model and reads it through the engine of the backend that runs the same.

The engines only describe here: a script trains by itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from harness.backends.base import Batch, Effective, Engine, SetupContext, World
from harness.backends.built_in import ENTRIES
from harness.backends.ddp import DdpEngine
from harness.backends.fsdp.fsdp1 import STRATEGIES, Fsdp1Engine, fsdp1_strategy
from harness.backends.fsdp.fsdp2 import Fsdp2Engine, fsdp2_strategy, parameter_groups
from harness.backends.model.blocks import parameter_count
from harness.backends.model.precision import dtype_name
from harness.backends.torch_engine import TorchEngine, TorchStrategy
from harness.backends.zero.engine import ZeroEngine


def fsdp1(
    fsdp: FullyShardedDataParallel, optimizers: Any, context: SetupContext
) -> tuple[Engine, str | None]:
    """The engine that reads it, and the built-in backend of the same strategy."""
    in_force, precision = fsdp.sharding_strategy, vars(fsdp.mixed_precision)
    dtypes = {key: dtype_name(value) for key, value in precision.items() if isinstance(value, torch.dtype)}
    config = {
        "sharding_strategy": in_force.name,
        "mixed_precision": dtypes,
        "use_orig_params": fsdp._use_orig_params,
    }
    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(fsdp)]
    count = sum(h.flat_param._unpadded_unsharded_size.numel() for h in handles if h is not None)
    strategy = fsdp1_strategy(fsdp, config, count, autocast=True)
    kinds = [
        (entry.name, entry.strategy.sharding)
        for entry in ENTRIES
        if entry.strategy and (entry.strategy.family, entry.strategy.route) == ("fsdp1", "native")
    ]
    base = next((name for name, sharding in kinds if STRATEGIES[sharding] is in_force), None)
    return Fsdp1Engine(fsdp, optimizers, context, strategy), base


def fsdp2(root: nn.Module, optimizers: Any, context: SetupContext) -> tuple[Engine, str | None]:
    """The same; `root` contains or is what `fully_shard` was called on."""
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in parameter_groups(unit._get_fsdp_state())]
    policy, mesh = groups[0].mp_policy, groups[0].mesh_info.mesh
    # The root keeps its weights by default; the other units show what was asked for.
    others = [group for group in groups if group is not groups[0]] or groups
    reshards = all(group.post_forward_mesh_info is not None for group in others)
    offload = type(groups[0].offload_policy).__name__
    strategy = fsdp2_strategy(
        root, units, mesh, policy, parameter_count(root), reshards, offload == "CPUOffloadPolicy", {},
        autocast=True,
    )  # fmt: skip
    strategy.native_config["offload_policy"] = offload
    base = "fsdp-hybrid" if mesh.ndim > 1 else ("fsdp" if reshards else "fsdp-grad-op")
    return Fsdp2Engine(root, optimizers, context, strategy), base


ASKED_OF_ACCELERATE = {
    "ACCELERATE_USE_FSDP": ("FSDP through Accelerate", (Fsdp1Engine, Fsdp2Engine)),
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed through Accelerate", (ZeroEngine,)),
}
"""Variables of `accelerate launch` and its plugins: what they ask for, and the engines that read it."""


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
    reduces_by: str = ""
    """A function of the script's, or of a library's, that DDP calls in place of its all-reduce."""
    outer: nn.Module | None = None
    """What wraps `bare` and knows the whole shapes of its parameters; None: `bare` itself does."""

    @property
    def whole(self) -> nn.Module:
        """The model, with what knows the shapes of its parameters."""
        return self.bare if self.outer is None else self.outer

    @property
    def has_form(self) -> bool:
        """Whether closed forms hold: they know no units within units, and no reduction of a script's own."""
        units = [f"{name}." for name in self.engine.effective().wrap_units if name]
        return not self.reduces_by and not any(a != b and a.startswith(b) for a in units for b in units)


@dataclass
class Optimizers:
    """The optimizers that step, as one."""

    each: list[torch.optim.Optimizer] = field(default_factory=list)
    steps_before: int = 0
    """Of those that had been counted when the only one was first seen: it may come from a checkpoint."""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """One that was made anew for the tensors of another takes its place."""
        if any(optimizer is known for known in self.each):
            return
        given, held = _tensors_of(optimizer), [_tensors_of(known) for known in self.each]
        place = next((n for n, own in enumerate(held) if own and own <= given), len(held))
        self.steps_before += (steps_of(optimizer) or 0) - sum(steps_of(o) or 0 for o in self.each[place:][:1])
        self.each[place : place + 1] = [optimizer]

    @property
    def steps(self) -> int | None:
        """Updates that the only optimizer counts; None: it counts none, or there are several."""
        counted = steps_of(self.each[0]) if len(self.each) == 1 else None
        return None if counted is None else counted - self.steps_before

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


def _tensors_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}


def steps_of(optimizer: torch.optim.Optimizer) -> int | None:
    """Most steps in its states; None: they count none."""
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    steps = [float(state["step"]) for state in states if isinstance(state.get("step"), (Tensor, int, float))]
    return int(max(steps)) if steps else None


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
            engine, base = fsdp1(module, optimizers, context)
            return Live(engine=engine, bare=module.module, base=base, cuts_units=True, outer=module)
        if isinstance(module, FSDPModule):
            engine, base = fsdp2(root, optimizers, context)
            return Live(engine=engine, bare=root, base=base, cuts_units=True)
    return _single(root, optimizers, context)


def asked_options(live: Live | None, frameworks: Iterable[str]) -> dict[str, Any]:
    """Options of the built-in backend `live.base` that the script gave to Accelerate."""
    of_torch = live is not None and live.base is not None and not isinstance(live.engine, ZeroEngine)
    if not of_torch or "accelerate" not in frameworks:
        return {}
    from accelerate.state import GradientState

    each = GradientState().plugin_kwargs.get("sync_each_batch", False)
    return {"sync_each_batch": True} if each else {}


def effective_of(
    live: Live, optimizers: Optimizers, accumulation: int, frameworks: Iterable[str]
) -> Effective:
    """What really runs, with the optimizers that were seen to step, under the libraries that drive."""
    effective = live.engine.effective()
    asked = next((name for variable, (name, engines) in ASKED_OF_ACCELERATE.items()
                  if os.environ.get(variable, "").lower() == "true" and not isinstance(live.engine, engines)),
                 None)  # fmt: skip
    return dataclasses.replace(
        effective,
        optimizer=optimizers.name or effective.optimizer,
        accumulation_steps=accumulation,
        requested_strategy=asked if asked and "accelerate" in frameworks else effective.requested_strategy,
    )


def _ddp(ddp: DistributedDataParallel, optimizers: Optimizers, context: SetupContext) -> Live:
    dtype = next(ddp.parameters()).dtype
    strategy = TorchStrategy(
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
        parameter_count=parameter_count(ddp),
        compute_dtype=dtype,
        autocast=True,
        offload=[],
        reduce_bucket_bytes=ddp.bucket_bytes_cap,
        details={"gradient_as_bucket_view": ddp.gradient_as_bucket_view},
    )
    hooks = ", ".join(getattr(hook, "__name__", "a function") for hook, _ in getattr(ddp, "_comm_hooks", []))
    return Live(
        engine=DdpEngine(ddp, optimizers, context, strategy),  # type: ignore[arg-type]
        bare=ddp.module,
        base="ddp",
        note=f"DDP reduces gradients by {hooks}: bytes and memory are not judged" if hooks else None,
        reduces_by=hooks,
    )


def _single(root: nn.Module, optimizers: Optimizers, context: SetupContext) -> Live:
    dtype = next(root.parameters()).dtype
    several = context.world.world_size > 1
    strategy = TorchStrategy(
        name="several processes without gradient synchronisation" if several else "single process",
        native_config={},
        wrap_units=[""],
        reduce_dtype=None,
        parameter_count=parameter_count(root),
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


def _zero(engine: Any, context: SetupContext) -> Live:
    stage = int(engine.zero_optimization_stage())
    config = json.loads(json.dumps(engine._config._param_dict, default=str))
    count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    reader = ZeroEngine(engine, context, config, stage, count)
    return Live(engine=reader, bare=engine.module, base=f"zero{stage}")


def _never(_module: nn.Module, _batch: Batch) -> Tensor:
    raise AssertionError("the engine of an observed script does not train")
