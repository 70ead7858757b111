"""What can be read of a script's model and optimizers once they train, and the settings of a job it shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.backends.base import Effective, Unsupported
from harness.backends.blocks import transformer_blocks
from harness.backends.precision import dtype_name
from harness.record import LayoutPart, ModelPart, ObservedPart, TensorPart
from harness.worker.accelerator import uses_tf32
from harness.worker.compiling import is_compiled
from harness.worker.description import describe_geometry
from harness.worker.environment import is_deterministic
from harness.worker.observing.live import Live, Optimizers

CONSTANTS = ("betas", "eps", "weight_decay", "momentum", "amsgrad", "maximize")
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
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


def layout_of(live: Live, optimizers: Optimizers) -> LayoutPart | None:
    """Tensors of the whole model; None: a flat parameter hides their shapes."""
    shapes = whole_shapes(live.bare)
    if shapes is None:
        return None
    named = list(live.bare.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter in named:
        first.setdefault(id(parameter), bare_name(name))
    decaying = {
        id(p) for group in optimizers.param_groups if group.get("weight_decay") for p in group["params"]
    }
    parameters = {id(parameter): parameter for _, parameter in named}
    return LayoutPart(
        parameters=[
            TensorPart(name=name, shape=shapes[name], dtype=dtype_name(parameters[key].dtype))
            for key, name in first.items()
        ],
        decaying=sorted(name for key, name in first.items() if key in decaying),
        buffers=[
            TensorPart(name=bare_name(name), shape=list(buffer.shape), dtype=dtype_name(buffer.dtype))
            for name, buffer in live.bare.named_buffers()
        ],
        blocks=_blocks(live.bare),
        tied={
            bare_name(name): first[id(parameter)]
            for name, parameter in named
            if bare_name(name) != first[id(parameter)]
        },
    )


def whole_shapes(module: nn.Module) -> dict[str, list[int]] | None:
    """Shapes of the whole parameters by name, whatever holds pieces of them; None: they cannot be known."""
    shapes: dict[str, list[int]] = {}
    for name, unit in module.named_modules():
        flat = getattr(unit, "_flat_param", None)
        if isinstance(flat, Tensor):
            prefix = bare_name(f"{name}.") if name else ""
            for own, shape in zip(flat._fqns, flat._shapes, strict=True):  # type: ignore[attr-defined]
                shapes[prefix + bare_name(own)] = list(shape)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if type(parameter).__name__ != "FlatParameter":
            shapes.setdefault(bare_name(name), list(getattr(parameter, "ds_shape", parameter.shape)))
    names = {bare_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    return shapes if names <= shapes.keys() else None


def model_part(live: Live, layout: LayoutPart | None, effective: Effective) -> ModelPart:
    """The model as it trains."""
    model: Any = hugging_face_model(live.bare)
    named = model if model is not None else live.bare
    whole = all(not hasattr(p, "ds_shape") for p in live.bare.parameters()) and not _is_flat(live.bare)
    return ModelPart(
        architecture=_architecture(named),
        attention=getattr(model.config, "_attn_implementation", None) if model is not None else None,
        parameters=effective.parameter_count,
        tied_parameters=len(layout.tied) if layout else 0,
        activation_checkpointing=recomputes(live.bare),
        geometry=describe_geometry(model) if model is not None and whole else None,
        config=model.config.to_diff_dict() if model is not None else {},
    )


def observed_part(live: Live, optimizers: Optimizers) -> ObservedPart:
    """What trains, in the form of the record."""
    tensors = [state for one in optimizers.each for state in one.state.values() if isinstance(state, Mapping)]
    steps = [float(state["step"]) for state in tensors if isinstance(state.get("step"), (Tensor, int, float))]
    held = [key for key in optimizers.state if isinstance(key, Tensor)]
    model: Any = hugging_face_model(live.bare)
    given = {id(p) for group in optimizers.param_groups for p in group["params"]}
    own = dict(live.bare.named_parameters())
    comparable = given <= {id(parameter) for parameter in own.values()}
    return ObservedPart(
        parameters_left_out=sorted(
            bare_name(name)
            for name, p in own.items()
            if comparable and p.requires_grad and id(p) not in given
        ),
        optimizer_used=bool(optimizers.each),
        optimizer_steps=int(max(steps)) if steps else None,
        optimizer_groups=[_constants(group) for group in optimizers.param_groups],
        master_dtypes=sorted({dtype_name(tensor.dtype) for tensor in held}),
        optimizer_state_dtypes=sorted(
            {
                dtype_name(value.dtype)
                for state in tensors
                for key, value in state.items()
                if isinstance(value, Tensor) and key != "step"
            }
        ),
        tied_parameters=len(list(live.bare.named_parameters(remove_duplicate=False))) - len(own),
        frozen_parameters=sorted(bare_name(name) for name, p in own.items() if not p.requires_grad),
        attention=getattr(model.config, "_attn_implementation", None) if model is not None else None,
        activation_checkpointing=recomputes(live.bare),
        compiled=is_compiled(live.bare),
        dropout=largest_dropout(live.bare),
        tf32=uses_tf32(),
        deterministic=is_deterministic("cuda" if torch.cuda.is_initialized() else "cpu"),
    )


def settings_seen(
    live: Live, effective: Effective, model: ModelPart, optimizers: Optimizers
) -> dict[str, Any]:
    """Settings of a job, by name, that the live objects show."""
    compute = effective.autocast_dtype or effective.parameter_dtype
    group = optimizers.param_groups[0] if optimizers.param_groups else {}
    betas = group.get("betas") or (None, None)
    adapted = any(type(module).__name__.startswith("PeftModel") for module in live.bare.modules())
    return {
        "task": "causal-lm" if is_causal(live.bare) else None,
        "adapter.kind": "lora" if adapted else "none",
        "model.config": model.config or None,
        "model.attention": model.attention,
        "model.dropout": largest_dropout(live.bare),
        "optimizer.beta1": betas[0],
        "optimizer.beta2": betas[1],
        "optimizer.epsilon": group.get("eps"),
        "optimizer.weight_decay": max(
            (g.get("weight_decay") or 0.0 for g in optimizers.param_groups), default=None
        ),
        "training.accumulation_steps": effective.accumulation_steps,
        "training.precision": PRECISIONS.get((compute, effective.master_dtype)),
        "training.gradient_clipping": effective.gradient_clipping,
        "training.activation_checkpointing": model.activation_checkpointing,
        "training.deterministic": is_deterministic("cuda" if torch.cuda.is_initialized() else "cpu"),
        "training.tf32": uses_tf32(),
    }


def recomputes(module: nn.Module) -> bool:
    """Whether a part of the model recomputes its activations."""
    return any(
        getattr(m, "gradient_checkpointing", False) is True or type(m).__name__ == "CheckpointWrapper"
        for m in module.modules()
    )


def largest_dropout(module: nn.Module) -> float:
    """Largest probability of a dropout that works in training."""
    return max((m.p for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd)), default=0.0)


def bare_name(name: str) -> str:
    """A parameter's name without what wrapping modules put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def elements(shapes: Iterable[list[int]]) -> int:
    """Elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def _blocks(module: nn.Module) -> list[str]:
    model = hugging_face_model(module)
    if model is None:
        return []
    prefix = next(name for name, found in module.named_modules() if found is model)
    try:
        return [bare_name(f"{prefix}.{name}" if prefix else name) for name in transformer_blocks(model)]
    except Unsupported:
        return []


def _architecture(module: nn.Module) -> str:
    """The class; FSDP2 derives one of its own from it."""
    return type(module).__name__.removeprefix("FSDP")


def _is_flat(module: nn.Module) -> bool:
    return any(isinstance(getattr(m, "_flat_param", None), Tensor) for m in module.modules())


def _constants(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(v) if isinstance(v := group[key], tuple) else v for key in CONSTANTS if key in group}
