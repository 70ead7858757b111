"""What can be read of a script's model and optimizers once they train, and the settings of a job it shows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.backends.base import Effective, World
from harness.backends.model.blocks import transformer_blocks
from harness.backends.model.precision import dtype_name
from harness.backends.optimizer.groups import group_constants, group_rate, held_tensors
from harness.rank.accelerator import uses_tf32
from harness.rank.live.live_model import (
    Whole,
    bare_module_name,
    bare_name,
    largest_dropout,
    recomputes,
    whole_parameters,
)
from harness.rank.models.changes import is_compiled
from harness.rank.models.description import describe_geometry
from harness.rank.observing.live import Live, Optimizers
from harness.rank.process.environment import is_deterministic
from harness.record import LayoutPart, ModelPart, ObservedPart, TensorPart


@dataclass
class Seen:
    """Changes while the script runs."""

    autocast: torch.dtype | None = None
    """Dtype that autocast computed in; None: none was at work."""
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


def is_causal(module: nn.Module) -> bool:
    """Whether it holds a causal language model of transformers, which shifts its labels."""
    model = hugging_face_model(module)
    return model is not None and type(model).__name__.endswith(("ForCausalLM", "GPT2LMHeadModel"))


def observed_layout(live: Live, optimizers: Optimizers) -> LayoutPart:
    """Tensors of the whole model."""
    named = whole_parameters(live.whole)
    first: dict[tuple[int, str], str] = {}
    for one in named:
        first.setdefault(one.key, one.name)
    decaying = {
        id(p) for group in optimizers.param_groups if group.get("weight_decay") for p in group["params"]
    }
    frozen = sorted(one.name for one in named if first[one.key] == one.name and not one.trains)
    return LayoutPart(
        parameters=[
            TensorPart(name=one.name, shape=one.shape, dtype=dtype_name(one.dtype))
            for one in named
            if first[one.key] == one.name
        ],
        decaying=sorted(one.name for one in named if first[one.key] == one.name and id(one.held) in decaying),
        buffers=[
            TensorPart(name=bare_name(name), shape=list(buffer.shape), dtype=dtype_name(buffer.dtype))
            for name, buffer in live.bare.named_buffers()
        ],
        blocks=_blocks(live),
        tied={one.name: first[one.key] for one in named if first[one.key] != one.name},
        frozen=frozen,
        without_gradient=None if frozen else [],
        # What runs, and where gradients go, is not traced of a script.
        uses=None if frozen else {},
        unreached=None if frozen else [],
        unit_calls=None if frozen else [],
        read_outside=None,
        changed_in_passes=None,
    )


def trained_elements(module: nn.Module) -> int:
    """Elements of the whole model that train; a tied tensor counts once."""
    trained = {one.key: one.shape for one in whole_parameters(module) if one.trains}
    return sum(math.prod(shape) for shape in trained.values())


def model_part(live: Live, layout: LayoutPart, effective: Effective) -> ModelPart:
    """The model as it trains."""
    model: Any = hugging_face_model(live.bare)
    named = model if model is not None else live.bare
    cut = any(hasattr(p, "ds_shape") for p in live.bare.parameters())
    cut = cut or any(map(_holds_flat, live.bare.modules()))
    return ModelPart(
        architecture=_architecture(named),
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
        parameters_left_out=left_out(whole, optimizers),
        optimizer_used=bool(optimizers.each),
        optimizer_steps=optimizers.steps,
        optimizer_groups=_groups(optimizers, whole, seen),
        updated_tensors=seen.updated_tensors,
        master_dtypes=sorted({dtype_name(tensor.dtype) for tensor in held}),
        optimizer_state_dtypes=sorted(
            {dtype_name(tensor.dtype) for name, tensor in held_tensors(states) if name != "step"}
        ),
        tied_parameters=len(whole) - len({one.key for one in whole}),
        frozen_parameters=sorted({one.name for one in whole if not one.trains}),
        attention=getattr(model.config, "_attn_implementation", None) if model is not None else None,
        activation_checkpointing=recomputes(live.bare),
        compiled=is_compiled(live.bare),
        dropout=largest_dropout(live.bare),
        tf32=uses_tf32(),
        deterministic=is_deterministic(),
    )


def left_out(whole: Sequence[Whole], optimizers: Optimizers) -> list[str]:
    """Parameters that train and no optimizer was given; none where its own tensors may be copies of them."""
    given = {id(p): p for group in optimizers.param_groups for p in group["params"]}
    held = {id(one.held): one.held for one in whole}
    kept = {one.name: one.held for one in whole if one.trains and id(one.held) not in given}
    left = {id(tensor): tensor.numel() for tensor in kept.values()}
    own = sum(tensor.numel() for key, tensor in given.items() if key not in held)
    return sorted(kept) if own < sum(left.values()) else []


def _groups(optimizers: Optimizers, whole: Sequence[Whole], seen: Seen) -> list[dict[str, Any]]:
    """Each group with its constants, rate, dtypes, number of tensors and, where known, their names."""
    names: dict[int, list[str]] = {}
    for one in whole:
        names.setdefault(id(one.held), []).append(one.name)
    found = []
    for place, group in enumerate(optimizers.param_groups):
        tensors = group["params"]
        count = max(seen.group_tensors.get(place, 0), len(tensors))
        document = group_constants(group) | {
            "learning_rate": group_rate(group),
            "dtypes": sorted({dtype_name(p.dtype) for p in tensors}),
            "tensors": count,
        }
        if count == len(tensors) and all(id(p) in names for p in tensors):
            document["parameters"] = sorted({name for p in tensors for name in names[id(p)]})
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
    adapted = any(type(module).__name__.startswith("PeftModel") for module in live.bare.modules())
    return {
        "task": "causal-lm" if is_causal(live.bare) else None,
        "adapter.kind": "lora" if adapted else "none",
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


def _blocks(live: Live) -> list[str]:
    """Blocks of a transformer; of another model the units that its weights are gathered in."""
    model = hugging_face_model(live.bare)
    if model is None:
        units = map(bare_module_name, live.engine.effective().wrap_units)
        return [unit for unit in units if unit] if live.cuts_units else []
    prefix = next(name for name, found in live.bare.named_modules() if found is model)
    return [bare_module_name(f"{prefix}.{name}" if prefix else name) for name in transformer_blocks(model)]


def _architecture(module: nn.Module) -> str:
    """The class; FSDP2 derives one of its own from it."""
    return type(module).__name__.removeprefix("FSDP")


def _holds_flat(module: nn.Module) -> bool:
    return isinstance(getattr(module, "_flat_param", None), Tensor)


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
