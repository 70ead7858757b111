"""What trains in a script: its strategy, read through the engine of the backend that runs the same, its model
and optimizers, and the settings of a job that these show. The engines only describe: a script trains itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from gc import get_referrers
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from harness.backends.base import Batch, Effective, Engine, SetupContext, World
from harness.backends.ddp import DdpEngine, ddp_strategy
from harness.backends.fsdp.fsdp1 import STRATEGIES, Fsdp1Engine, fsdp1_strategy
from harness.backends.fsdp.fsdp2 import Fsdp2Engine, fsdp2_strategy, of_replicas, parameter_groups
from harness.backends.model.blocks import parameter_count, transformer_blocks
from harness.backends.model.precision import dtype_name
from harness.backends.optimizer.gradients import local_shard
from harness.backends.optimizer.groups import group_constants, group_rate, held_tensors
from harness.backends.presets import ZERO_LIMITS
from harness.backends.registry import ENTRIES
from harness.backends.torch_engine import TorchEngine
from harness.backends.zero.engine import ZeroEngine
from harness.forms import layout as forms
from harness.forms.layout import Layout
from harness.nested import grouped
from harness.rank.accelerator import uses_tf32
from harness.rank.live.model_watch import (
    Whole,
    bare_module_name,
    bare_name,
    largest_dropout,
    recomputes,
    whole_parameters,
)
from harness.rank.models.changes import is_compiled
from harness.rank.models.description import describe_geometry
from harness.rank.process.environment import is_deterministic
from harness.record import ModelPart, ObservedPart


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


def fsdp2(root: nn.Module, optimizers: Any, context: SetupContext) -> tuple[Engine, str | None, bool]:
    """As `fsdp1`, and whether some units keep their weights, as the tail does that Accelerate 1.15 wraps.

    `root` contains or is what `fully_shard` was called on.
    """
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in parameter_groups(unit._get_fsdp_state())]
    policy, mesh = groups[0].mp_policy, groups[0].mesh_info.mesh
    # The root keeps its weights by default; the other units show what was asked for.
    others = [group for group in groups if group is not groups[0]] or groups
    kept = [group.post_forward_mesh_info is None for group in others]
    reshards = not all(kept)
    offload = type(groups[0].offload_policy).__name__
    strategy = fsdp2_strategy(
        root, units, mesh, policy, parameter_count(root), offload == "CPUOffloadPolicy",
        {"reshard_after_forward": reshards}, autocast=True,
    )  # fmt: skip
    strategy.native_config["offload_policy"] = offload
    base = "fsdp-hybrid" if mesh.ndim > 1 else ("fsdp" if reshards else "fsdp-grad-op")
    if groups[0].mesh_info.shard_mesh_dim is None:
        strategy, base = of_replicas(strategy, mesh), "replicate"
    return Fsdp2Engine(root, optimizers, context, strategy), base, reshards and any(kept)


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
    is_mixed: bool = False
    """Whether some units of FSDP2 keep their weights after the forward pass and others do not."""
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
        """Whether closed forms hold: they know no units within units, none that keep their weights beside
        others, and no reduction of a script's own."""
        if self.is_mixed:
            return False
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
        given, held = tensors_of(optimizer), [tensors_of(known) for known in self.each]
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


def tensors_of(optimizer: torch.optim.Optimizer) -> set[int]:
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
    root = max(roots, key=parameter_count)
    for module in root.modules():
        if _is_zero(module):
            stage = int(module.zero_optimization_stage())  # type: ignore[operator]
            config = json.loads(json.dumps(module._config._param_dict, default=str))  # type: ignore[union-attr]
            bare: Any = module.module
            count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in bare.parameters())
            reader = ZeroEngine(module, context, config, stage, count)
            return Live(engine=reader, bare=bare, base=f"zero{stage}")
        if isinstance(module, DistributedDataParallel):
            return _ddp(module, optimizers, context)
        if isinstance(module, FullyShardedDataParallel):
            engine, base = fsdp1(module, optimizers, context)
            return Live(engine=engine, bare=module.module, base=base, cuts_units=True, outer=module)
        if isinstance(module, FSDPModule):
            engine, base, is_mixed = fsdp2(root, optimizers, context)
            return Live(engine=engine, bare=root, base=base, cuts_units=True, is_mixed=is_mixed)
    return _single(root, optimizers, context)


SHARDED: dict[type, type[TorchEngine]] = {FullyShardedDataParallel: Fsdp1Engine, FSDPModule: Fsdp2Engine}


def sharded_by(root: nn.Module) -> type | None:
    """FSDP1's or FSDP2's class of units, if a module has any."""
    return next((kind for kind in SHARDED if any(isinstance(one, kind) for one in root.modules())), None)


def gathers(root: nn.Module) -> bool:
    """Whether each forward pass of it may gather weights."""
    return sharded_by(root) is not None or any(map(_is_zero, root.modules()))


def follow(optimizer: torch.optim.Optimizer, roots: Iterable[nn.Module], seen: Seen) -> bool:
    """Note which tensors of an optimizer that no root has get a gradient from a backward pass: masters, or
    what stood for parameters before they were wrapped, do not. Whether there are any."""
    known = {id(p) for root in roots for p in root.parameters()}

    def passed(tensor: Tensor) -> None:
        seen.of_no_module[id(tensor)] = tensor.numel()
        hooks.pop(id(tensor)).remove()

    hooks = {
        id(p): p.register_post_accumulate_grad_hook(passed)
        for group in optimizer.param_groups for p in group["params"]
        if id(p) not in known and p.requires_grad and p.is_leaf
    }  # fmt: skip
    return bool(hooks)


def unwrapped(roots: Iterable[nn.Module], live: Live, seen: Seen) -> dict[str, int]:
    """Elements that train beside the described model without being synchronised, by class of their root."""
    modules = [module for root in roots for module in root.modules()]
    wrapped = (m for m in modules if isinstance(m, (DistributedDataParallel, *SHARDED)) or _is_zero(m))
    known = {id(p) for module in (*wrapped, live.bare) for p in module.parameters()}
    found = {
        type(root).__name__: sum(
            p.numel() for p in root.parameters() if p.requires_grad and id(p) not in known
        )
        for root in roots
    }
    known |= {id(p) for module in modules for p in module._parameters.values()}
    loose = (count for place, count in seen.of_no_module.items() if place not in known)
    found["parameters of no module"] = sum(loose)
    return {name: count for name, count in found.items() if count}


def added(live: Live) -> list[str]:
    """Parameters that train in the described model and that what wraps it was never given."""
    module = getattr(live.engine, "module", None)
    if isinstance(module, DistributedDataParallel):
        known = {id(parameter) for parameter in module._module_parameters}
    elif isinstance(module, FullyShardedDataParallel):
        flat = [h.flat_param for unit in FullyShardedDataParallel.fsdp_modules(module) if (h := unit._handle)]
        known = {id(p) for one in flat for p in (one, *(one._params or ()))}
    elif live.cuts_units:
        units = (unit for unit in live.bare.modules() if isinstance(unit, FSDPModule))
        held = (one for u in units for g in parameter_groups(u._get_fsdp_state()) for one in g.fsdp_params)
        # The root keeps what it has gathered for a pass without gradients.
        known = {id(p) for one in held for p in (one.sharded_param, getattr(one, "_unsharded_param", None))}
    else:
        return []
    named = live.bare.named_parameters()
    return sorted(bare_name(name) for name, p in named if p.requires_grad and id(p) not in known)


def _is_zero(module: nn.Module) -> bool:
    return type(module).__name__ == "DeepSpeedEngine"


def weights_of(root: nn.Module) -> Iterator[Tensor]:
    """What this rank holds of the weights and buffers of a module that need not train."""
    if (kind := sharded_by(root)) is None:
        yield from (getattr(one, "ds_tensor", one).detach() for one in (*root.parameters(), *root.buffers()))
        return
    # Of the context it reads this alone, of the strategy nothing.
    engine = SHARDED[kind](root, Optimizers(), SimpleNamespace(compile=None), None)  # type: ignore[arg-type]
    yield from (tensor for name, tensor in engine.state_tensors() if name in ("weights", "buffers"))


WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PIECE = 2**16
"""Elements that are added up at once, which takes a copy."""


def bits_of(root: nn.Module) -> dict[str, int]:
    """Sum, as whole numbers, of the bits that this rank holds of each tensor that trains."""
    found = {}
    module = root.module if isinstance(root, DistributedDataParallel) else root
    for name, parameter in module.named_parameters():
        held = local_shard(parameter.detach())
        whole = WHOLE_NUMBERS.get(held.element_size())
        if parameter.requires_grad and held.numel() and whole and type(held) in (Tensor, nn.Parameter):
            # Not by NumPy: FSDP2 could not free the memory that it has seen.
            parts = held.view(whole).flatten().split(PIECE)
            found[bare_name(name)] = sum(int(part.sum(dtype=torch.int64)) for part in parts)
    return found


def stood_still(live: Live, optimizers: Optimizers, names: Iterable[str]) -> list[str]:
    """Tensors of a low precision, among these, that an optimizer updates and was given gradients for."""
    held = {bare_name(name): parameter for name, parameter in live.whole.named_parameters()}
    low = {name: held[name] for name in names if name in held and held[name].element_size() < 4}
    states = {name: optimizers.state.get(tensor) for name, tensor in low.items()}
    return [
        name for name, state in states.items()
        if isinstance(state, Mapping) and any(t.dim() and bool(t.any()) for _, t in held_tensors([state]))
    ]  # fmt: skip


def asked_options(live: Live | None, frameworks: Iterable[str]) -> dict[str, Any]:
    """Options of the built-in backend `live.base` that the script gave to a library, unlike its defaults."""
    if live is None or live.base is None:
        return {}
    if isinstance(live.engine, ZeroEngine):
        given = live.engine.native_config().get("zero_optimization", {})
        limits = {name: given.get(name, default) for name, default in ZERO_LIMITS.items()}
        return {
            name: int(limit) for name, limit in limits.items() if limit not in ("auto", ZERO_LIMITS[name])
        }
    effective, options = live.engine.effective(), dict[str, Any]()
    if live.cuts_units and effective.reduce_dtype == "float32" != effective.parameter_dtype:
        options["reduce_dtype"] = "fp32"
    if "accelerate" in frameworks:
        from accelerate.state import GradientState

        options |= {k: v for k, v in GradientState().plugin_kwargs.items() if k == "sync_each_batch" and v}
    return options


def effective_of(live: Live, optimizers: Optimizers, accumulation: int, seen: Seen) -> Effective:
    """What really runs, with the optimizers that were seen to step, under the libraries that drive."""
    effective = live.engine.effective()
    asked = next((name for variable, (name, engines) in ASKED_OF_ACCELERATE.items()
                  if os.environ.get(variable, "").lower() == "true" and not isinstance(live.engine, engines)),
                 None)  # fmt: skip
    return dataclasses.replace(
        effective,
        optimizer=optimizers.name or effective.optimizer,
        accumulation_steps=accumulation,
        loss_scale=effective.loss_scale if seen.loss_scale is None else seen.loss_scale,
        requested_strategy=asked
        if asked and "accelerate" in seen.frameworks
        else effective.requested_strategy,
    )


def _ddp(ddp: DistributedDataParallel, optimizers: Optimizers, context: SetupContext) -> Live:
    settings = (
        "gradient_as_bucket_view", "bucket_bytes_cap", "find_unused_parameters", "static_graph",
        "broadcast_buffers",
    )  # fmt: skip
    strategy = ddp_strategy(ddp, {name: getattr(ddp, name) for name in settings}, parameter_count(ddp))
    hooks = ", ".join(getattr(hook, "__name__", "a function") for hook, _ in getattr(ddp, "_comm_hooks", []))
    return Live(
        engine=DdpEngine(ddp, optimizers, context, strategy),  # type: ignore[arg-type]
        bare=ddp.module,
        base="ddp",
        note=f"DDP reduces gradients by {hooks}: bytes and memory are not judged" if hooks else None,
        reduces_by=hooks,
    )


def _single(root: nn.Module, optimizers: Optimizers, context: SetupContext) -> Live:
    several = context.world.world_size > 1
    name = "several processes without gradient synchronisation" if several else "single process"
    strategy = ddp_strategy(root, {}, parameter_count(root), name=name, reduce_dtype=None)
    note = None
    if several:
        note = (
            f"{context.world.world_size} processes train and nothing wraps the model: unless the script "
            "reduces gradients itself, each trains a model of its own"
        )
    base = None if several else "single"
    return Live(engine=TorchEngine(root, optimizers, context, strategy), bare=root, base=base, note=note)  # type: ignore[arg-type]


def _never(_module: nn.Module, _batch: Batch) -> Tensor:
    raise AssertionError("the engine of an observed script does not train")


@dataclass
class Seen:
    """Changes while the script runs."""

    autocast: torch.dtype | None = None
    """Dtype that autocast computed in; None: none was at work."""
    beside_autocast: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Layers that multiply in training passes where autocast is switched off."""
    passing_back: WeakSet[nn.Module] = field(default_factory=WeakSet)
    ending: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Modules that the first training passes ran, and that returned what needs a gradient, or none."""
    clipping: float | None = None
    """Largest norm that gradients were clipped to; None: they were not."""
    accumulation: int = 1
    """Micro-steps of the last step that ended."""
    steps: int = 0
    """Optimizer steps that ended."""
    rates: dict[int, float | None] = field(default_factory=dict)
    """By group, the rate with which its optimizer steps now; None: it has none."""
    group_tensors: dict[int, int] = field(default_factory=dict)
    """By group, the most tensors that it held while its optimizer stepped: ZeRO-3 fills them only then."""
    updated_tensors: int | None = None
    """Most tensors with a gradient that optimizers were given in one of the first steps; None: not looked."""
    has_form: bool = True
    """Whether each step is one of those that closed forms know: every gradient is computed once, then one
    optimizer updates."""
    bare_updates: int = 0
    """Updates that followed no call of backward()."""
    loss_scale: float | None = None
    """By which a scaler multiplied the first loss; None: none did."""
    has_loader: bool = False
    """Whether batches were seen to come from a data loader."""
    parts: int = 1
    """Into how many parts loaders divided their samples, one for each rank."""
    shuffles: list[int] = field(default_factory=list)
    """Steps before which a sampler began to shuffle all samples of a loader."""
    repeated_epochs: int = 0
    """Times that a sampler that shuffles was gone through with the epoch of before."""
    masks_repeated: int = 0
    """Steps whose first pass drew from a random state in which an earlier step had begun."""
    further_passes: int = 0
    """Backward passes that began in results of a forward pass that had one before."""
    labels_ahead: int = 0
    """Of the first steps, those whose labels stood one token ahead of what a model shifts."""
    world_left_out: int = 0
    """Those whose summed losses were divided by the targets of all ranks, and not multiplied by the ranks."""
    backward_ratios: list[tuple[int, float]] = field(default_factory=list)
    """Of steps their number of micro-steps, and `Step.backward_ratio`."""
    evaluating_since: int | None = None
    """The first step that trains in evaluation mode."""
    of_no_module: dict[int, int] = field(default_factory=dict)
    """Elements of tensors that an optimizer updates, that no called module had and that passes gave a
    gradient, by id."""
    discarded: int = 0
    """Micro-steps whose gradients were zeroed before an update."""
    frameworks: dict[str, None] = field(default_factory=dict)
    """Libraries that were seen to drive the training, in order."""


PRECISIONS = {
    ("float32", "float32"): "fp32",
    ("bfloat16", "float32"): "bf16-mixed",
    ("float16", "float32"): "fp16-mixed",
    ("bfloat16", "bfloat16"): "bf16",
}
"""(dtype of matrix products, dtype of the weights that the optimizer updates) -> `training.precision`."""


def hugging_face_model(module: nn.Module) -> nn.Module | None:
    """The model of transformers that a module is or contains; None: there is none."""
    # Not by getattr: FSDP1 and torch.compile have the attributes of what they wrap.
    return next((m for m in module.modules() if hasattr(vars(m).get("config"), "to_diff_dict")), None)


CAUSAL = ("ForCausalLM", "GPT2LMHeadModel")


def is_causal(module: nn.Module) -> bool:
    """Whether it holds a causal language model of transformers, which shifts its labels."""
    model = hugging_face_model(module)
    return model is not None and type(model).__name__.endswith(CAUSAL)


def shifts_labels(module: nn.Module) -> bool:
    """Whether a causal language model in it computes its loss by code of transformers alone."""
    own = "transformers."
    return any(
        type(one).__name__.endswith(CAUSAL)
        and inspect.unwrap(type(one).forward).__module__.startswith(own)
        and "_loss_function" not in vars(one)
        for one in module.modules()
    )


def adapters_of(module: nn.Module) -> list[Any]:
    """Configurations of the adapters that peft has put into it."""
    wrapped = next((one for one in module.modules() if type(one).__name__.startswith("PeftModel")), None)
    return list(getattr(wrapped, "peft_config", {}).values())


def read_by_layers(adapter: Any) -> bool:
    """Whether each adapter runs once with its layer, and no layer is there twice (`modules_to_save`)."""
    is_plain = adapter.peft_type == "LORA" and not adapter.use_dora
    return is_plain and not (adapter.modules_to_save or adapter.trainable_token_indices)


def observed_layout(live: Live, optimizers: Optimizers, seen: Seen) -> Layout:
    """Tensors of the whole model."""
    named = whole_parameters(live.whole)
    first: dict[tuple[int, str], str] = {}
    for one in named:
        first.setdefault(one.key, one.name)
    groups = members(live, optimizers)
    decaying = {
        id(p)
        for group, held in zip(optimizers.param_groups, groups, strict=True)
        if group.get("weight_decay")
        for p in held
    }
    parts = [{one.name for one in named if id(one.held) in set(map(id, held))} for held in groups]
    parts = [part & set(first.values()) for part in parts]
    decays = {one.name for one in named if first[one.key] == one.name and id(one.held) in decaying}
    by_decay = [part for part in (decays, set().union(*parts) - decays) if part]
    frozen = sorted(one.name for one in named if first[one.key] == one.name and not one.trains)
    model = hugging_face_model(live.bare)
    # What runs, and where gradients go, is not traced of a script. Adapters alone are in layers that run.
    lora = adapters_of(live.bare)
    runs_all = not frozen or (model is not None and [read_by_layers(one) for one in lora] == [True])
    within = {one: bare_module_name(name) for name, one in live.bare.named_modules() if name}
    ending = frozenset(within[one] for one in set(seen.ending) - set(seen.passing_back) if one in within)
    if model is not None:
        prefix = next(name for name, found in live.bare.named_modules() if found is model)
        blocks = [
            bare_module_name(f"{prefix}.{name}" if prefix else name) for name in transformer_blocks(model)
        ]
    else:  # the units that its weights are gathered in
        units = map(bare_module_name, live.engine.effective().wrap_units)
        blocks = [unit for unit in units if unit] if live.cuts_units else []
    return Layout(
        parameters=tuple(
            forms.Tensor(name=one.name, shape=tuple(one.shape), dtype=dtype_name(one.dtype))
            for one in named if first[one.key] == one.name
        ),
        decaying=frozenset(decays),
        groups=() if parts == by_decay else tuple(frozenset(part) for part in parts if part),
        buffers=tuple(
            forms.Tensor(name=bare_name(name), shape=buffer.shape, dtype=dtype_name(buffer.dtype))
            for name, buffer in live.bare.named_buffers()
        ),
        tied={one.name: first[one.key] for one in named if first[one.key] != one.name},
        blocks=tuple(blocks), frozen=frozenset(frozen),
        # Of compiled modules nothing is seen.
        without_gradient=frozenset() if not frozen else ending if runs_all and seen.passing_back else None,
        uses={} if runs_all else None, unreached=frozenset() if runs_all else None,
        unit_calls=() if runs_all else None, read_outside=None, changed_in_passes=None,
    )  # fmt: skip


def trained_elements(module: nn.Module) -> int:
    """Elements of the whole model that train; a tied tensor counts once."""
    trained = {one.key: one.shape for one in whole_parameters(module) if one.trains}
    return sum(math.prod(shape) for shape in trained.values())


def model_part(live: Live, layout: Layout, effective: Effective) -> ModelPart:
    """The model as it trains."""
    model: Any = hugging_face_model(live.bare)
    named = model if model is not None else live.bare
    cut = any(hasattr(p, "ds_shape") for p in live.bare.parameters()) or any(
        isinstance(getattr(module, "_flat_param", None), Tensor) for module in live.bare.modules()
    )
    return ModelPart(
        architecture=type(named).__name__.removeprefix("FSDP"),  # FSDP2 derives a class of its own
        attention=getattr(model.config, "_attn_implementation", None) if model is not None else None,
        parameters=effective.parameter_count,
        tied_parameters=len(layout.tied),
        activation_checkpointing=recomputes(live.bare),
        geometry=describe_geometry(model) if model is not None and not cut else None,
        config=model.config.to_diff_dict() if model is not None else {},
    )


def observed_part(live: Live, optimizers: Optimizers, seen: Seen) -> ObservedPart:
    """What trains, in the form of the record."""
    states = [state for one in optimizers.each for state in one.state.values() if isinstance(state, Mapping)]
    held = [key for key in optimizers.state if isinstance(key, Tensor)]
    model: Any = hugging_face_model(live.bare)
    whole = whole_parameters(live.whole)
    return ObservedPart(
        parameters_left_out=left_out(live, optimizers, seen)[0], optimizer_used=bool(optimizers.each),
        optimizer_steps=optimizers.steps, optimizer_groups=_groups(live, optimizers, whole, seen),
        updated_tensors=seen.updated_tensors,
        master_dtypes=sorted({dtype_name(tensor.dtype) for tensor in held}),
        optimizer_state_dtypes=sorted(
            {dtype_name(tensor.dtype) for name, tensor in held_tensors(states) if name != "step"}
        ),
        tied_parameters=len(whole) - len({one.key for one in whole}),
        frozen_parameters=sorted({one.name for one in whole if not one.trains}),
        attention=getattr(model.config, "_attn_implementation", None) if model is not None else None,
        activation_checkpointing=recomputes(live.bare), compiled=is_compiled(live.bare),
        dropout=largest_dropout(live.bare), tf32=uses_tf32(), deterministic=is_deterministic(),
    )  # fmt: skip


def members(live: Live, optimizers: Optimizers) -> list[list[Tensor]]:
    """Parameters that each group of the optimizers updates; under ZeRO those behind flat masters."""
    groups = [list(group["params"]) for group in optimizers.param_groups]
    owner = live.engine.engine.optimizer if isinstance(live.engine, ZeroEngine) else None
    low = getattr(owner, "bit16_groups", None)
    if low is not None and len(low) == len(groups):
        return [list(group) for group in low]
    cut, of_group = (getattr(owner, name, None) for name in ("fp16_groups", "sub_group_to_group_id"))
    if cut is not None and of_group is not None:
        return [
            [p for n, sub in enumerate(cut) if of_group[n] == place for p in sub]
            for place in range(len(groups))
        ]
    return groups


def left_out(live: Live, optimizers: Optimizers, seen: Seen) -> tuple[list[str], bool]:
    """Parameters that train and no optimizer was given, and whether one has tensors in their place that get
    no gradient; none where its own may be copies of them, as under ZeRO beside another optimizer."""
    if isinstance(live.engine, ZeroEngine) and len(optimizers.each) > 1:
        return [], False
    whole = whole_parameters(live.whole)
    given = {id(p): p for group in members(live, optimizers) for p in group}
    held = {id(one.held): one.held for one in whole}
    kept = {one.name: one.held for one in whole if one.trains and id(one.held) not in given}
    left = {id(tensor): tensor for tensor in kept.values()}
    own = [tensor for key, tensor in given.items() if key not in held]
    are_idle = seen.updated_tensors is not None and 0 < seen.updated_tensors <= len(given) - len(own)
    # One that a layer had is known to its optimizer alone once another layer has the place; one of a copy of
    # the model has the values that nothing updates.
    idle = own if are_idle and left else []
    gone = [
        one for one in idle
        if not any(type(holder) is dict and holder is not given for holder in get_referrers(one))
    ]  # fmt: skip
    replaced = any(_resized(one, tensor) for one in gone for tensor in left.values()) or any(
        torch.equal(one, other) and bool((one != one.flatten()[:1]).any())
        for one in idle for other in left.values() if one.device == other.device and type(one) is type(other)
    )  # fmt: skip
    is_less = sum(map(Tensor.numel, own)) < sum(map(Tensor.numel, left.values()))
    return (sorted(kept) if replaced or is_less else []), replaced


def _resized(one: Tensor, other: Tensor) -> bool:
    """Whether the shapes differ in one dimension at most."""
    unlike = sum(a != b for a, b in zip(one.shape, other.shape, strict=False))
    return one.dim() == other.dim() > 0 and unlike < 2


def are_copies(live: Live, optimizers: Optimizers) -> bool:
    """Whether optimizers hold states of what is no parameter of the model, as of masters made by hand."""
    known = {id(one.held) for one in whole_parameters(live.whole)}
    updated = {id(one) for one in optimizers.state if isinstance(one, Tensor)}
    return not isinstance(live.engine, ZeroEngine) and not updated <= known


def _groups(live: Live, optimizers: Optimizers, whole: Sequence[Whole], seen: Seen) -> list[dict[str, Any]]:
    """Each group with its constants, rate, dtypes, number of tensors and, where known, their names."""
    names = grouped((id(one.held), one.name) for one in whole)
    found = []
    for place, (group, held) in enumerate(
        zip(optimizers.param_groups, members(live, optimizers), strict=True)
    ):
        tensors = group["params"]
        count = max(seen.group_tensors.get(place, 0), len(tensors))
        document = group_constants(group) | {
            "learning_rate": group_rate(group),
            "dtypes": sorted({dtype_name(p.dtype) for p in tensors}),
            "tensors": count,
        }
        if count == len(tensors) and all(id(p) in names for p in held):
            document["parameters"] = sorted({name for p in held for name in names[id(p)]})
        found.append(document)
    return found


def settings_seen(
    live: Live, effective: Effective, model: ModelPart, optimizers: Optimizers
) -> dict[str, Any]:
    """Settings of a job, by name, that the live objects show."""
    compute = effective.autocast_dtype or effective.parameter_dtype
    betas = _common(optimizers, "betas")
    first, second = betas if isinstance(betas, list) and len(betas) == 2 else (None, None)
    decays = [_number(group_constants(group).get("weight_decay")) for group in optimizers.param_groups]
    adapters = adapters_of(live.bare)
    lora = adapters[0] if [one.peft_type for one in adapters] == ["LORA"] else None
    return {
        "task": "causal-lm" if is_causal(live.bare) else None,
        "adapter.kind": ("lora" if lora else None) if adapters else "none",
        "adapter.rank": lora and lora.r,
        "adapter.alpha": lora and lora.lora_alpha,
        "model.config": model.config or None,
        "model.attention": model.attention,
        "model.dropout": largest_dropout(live.bare),
        "optimizer.beta1": _number(first),
        "optimizer.beta2": _number(second),
        "optimizer.epsilon": _number(_common(optimizers, "eps")),
        "optimizer.weight_decay": max((decay for decay in decays if decay is not None), default=None),
        "training.precision": PRECISIONS.get((compute, effective.master_dtype)),
        "training.gradient_clipping": effective.gradient_clipping,
        "training.activation_checkpointing": model.activation_checkpointing,
        "training.deterministic": is_deterministic(),
        "training.tf32": uses_tf32(),
    }


def _common(optimizers: Optimizers, key: str) -> Any:
    """What every group has of a constant; None: they differ, or one has none."""
    values = [group_constants(group).get(key) for group in optimizers.param_groups]
    return values[0] if values and all(value == values[0] for value in values) else None


def _number(value: Any) -> float | None:
    """A constant that is one number: Adafactor has a list of epsilons."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def world_here(roots: Sequence[nn.Module]) -> World:
    """As torch.distributed says, else as the launcher's variables do, else one process."""
    joined = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if joined else int(os.environ.get("RANK", "0"))
    size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    devices = {parameter.device.type for root in roots for parameter in root.parameters()}
    return World(
        rank=rank,
        world_size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", str(rank))),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", str(size))),
        device="cuda" if "cuda" in devices else "cpu",
    )
