"""Parameters of a live model under their own names and shapes, whatever wraps or cuts it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """One parameter of the whole model, under one of its names."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    trains: bool
    held: Tensor
    """What the live model has of it; of flat parameters the tensor that holds several."""
    key: tuple[int, str]
    """Equal for the names of one tied parameter."""


def bare_name(name: str) -> str:
    """A parameter's name without what wrapping modules put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def bare_module_name(name: str) -> str:
    """The same of a module's name, which may be a wrapper itself."""
    return bare_name(f"{name}.").removesuffix(".")


def whole_parameters(module: nn.Module) -> list[Whole]:
    """Every name of every parameter; FSDP1 without original parameters shows flat ones in their place."""
    shapes = _flat_shapes(module)
    found: list[Whole] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_flat(parameter):
            prefix = bare_name(name.removesuffix("_flat_param"))
            found += _originals(prefix, parameter)
            continue
        bare = bare_name(name)
        shape = shapes.get(bare) or list(getattr(parameter, "ds_shape", parameter.shape))
        found.append(_whole(bare, shape, parameter, (id(parameter), "")))
    return found


def is_flat(parameter: Tensor) -> bool:
    """Whether it is a flat parameter of FSDP1, which holds those of a unit."""
    return bool(getattr(parameter, "_is_flat_param", False))


def recomputes(module: nn.Module) -> bool:
    """Whether a part of the model recomputes its activations."""
    return any(
        getattr(m, "gradient_checkpointing", False) is True or type(m).__name__ == "CheckpointWrapper"
        for m in module.modules()
    )


def _originals(prefix: str, flat: Tensor) -> Iterator[Whole]:
    """Parameters in a flat one; what other modules share with them under their names too."""
    pairs = list(zip(flat._fqns, flat._shapes, strict=True))  # type: ignore[attr-defined]
    first = {}
    infos = flat._param_infos  # type: ignore[attr-defined]
    for info, (name, shape) in zip(infos, pairs, strict=True):
        bare = prefix + bare_name(name)
        first[id(info.module), info.param_name] = (bare, list(shape))
        yield _whole(bare, list(shape), flat, (id(flat), bare))
    for shared in flat._shared_param_infos:  # type: ignore[attr-defined]
        bare, shape = first[id(shared.prim_module), shared.prim_param_name]
        module = bare_name(f"{shared.module_name}.") if shared.module_name else ""
        yield _whole(prefix + module + shared.param_name, shape, flat, (id(flat), bare))


def _flat_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Shapes of original parameters that views of flat ones stand for, by name."""
    shapes: dict[str, list[int]] = {}
    for name, unit in module.named_modules():
        flat = getattr(unit, "_flat_param", None)
        if isinstance(flat, Tensor):
            prefix = bare_name(f"{name}.") if name else ""
            for own, shape in zip(flat._fqns, flat._shapes, strict=True):  # type: ignore[attr-defined]
                shapes[prefix + bare_name(own)] = list(shape)
    return shapes


def _whole(name: str, shape: list[int], held: Tensor, key: tuple[int, str]) -> Whole:
    return Whole(name=name, shape=shape, dtype=held.dtype, trains=held.requires_grad, held=held, key=key)


OF_HEADS = ("summary_", "classifier_", "cls_")
"""Begin settings of heads that a model may not have; one that it has holds a module."""


def largest_dropout(model: nn.Module, resting: Collection[str] = ()) -> float:
    """Largest probability of a dropout that works in training. resting: modules that no training pass trains.

    That of a module, one that a module keeps as a number (attention kernels take it), or one that a Hugging
    Face configuration names and no module keeps, at any depth of what wraps the model.
    """
    return max(_probabilities(model, resting), default=0.0)


def _probabilities(model: nn.Module, resting: Collection[str]) -> Iterator[float]:
    configured: dict[int, Mapping[str, Any]] = {}
    kept: set[str] = set()
    for name, module in model.named_modules():
        works = bare_module_name(name) not in resting
        if works and isinstance(module, nn.modules.dropout._DropoutNd):
            yield float(module.p)
        # Not by getattr: FSDP1 and torch.compile have the attributes of what they wrap.
        for key, probability in _named(vars(module)):
            kept.add(key)
            yield probability if works else 0.0
        config: Any = vars(module).get("config")
        if hasattr(config, "to_dict") and id(config) not in configured and not _rests(name, module, resting):
            configured[id(config)] = config.to_dict()
    for values in configured.values():
        yield from (probability for key, probability in _named(values) if key not in kept)


def _rests(name: str, module: nn.Module, resting: Collection[str]) -> bool:
    """Whether a module has dropouts, none of which works."""
    prefix = f"{name}." if name else ""
    own = [
        bare_module_name(prefix + of)
        for of, part in module.named_modules()
        if of and isinstance(part, nn.modules.dropout._DropoutNd)
    ]
    return bool(own) and all(one in resting for one in own)


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if not isinstance(key, str) or key.startswith(OF_HEADS):
            continue
        if "dropout" in key or key.endswith("pdrop"):
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
                yield key, float(value)
