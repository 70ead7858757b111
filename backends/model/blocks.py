"""Which modules of a model are wrapped as units, and the names of its parameters."""

from __future__ import annotations

import torch
from torch import nn

from harness.backends.base import Unsupported


def transformer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Map names to the blocks of a model, in order of execution; empty where it has none.

    Uses the class names that the model declares in `_no_split_modules`, as Accelerate and the Trainer do; the
    model itself is no block of it. FSDP makes one unit of a model without blocks, as torch does unless it is
    told otherwise (`auto_wrap_policy=None`, `fully_shard(model)`).
    """
    declared = set(getattr(model, "_no_split_modules", None) or ())
    return {name: m for name, m in model.named_modules() if name and type(m).__name__ in declared}


def needed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The same, for what is done to blocks alone. Raises Unsupported where there are none."""
    if blocks := transformer_blocks(model):
        return blocks
    raise Unsupported(
        f"{type(model).__name__} has no blocks: no list of it repeats a class; name theirs in "
        "model.block_class"
    )


def block_classes(model: nn.Module) -> list[str]:
    """Full names of the classes of the blocks, each once. Raises Unsupported where there are none."""
    kinds = dict.fromkeys(type(block) for block in needed_blocks(model).values())
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]


def first_trained(module: nn.Module) -> nn.Parameter:
    """The first parameter that gets a gradient: frozen ones may have another dtype."""
    return next(parameter for parameter in module.parameters() if parameter.requires_grad)


def frozen_dtype(module: nn.Module) -> torch.dtype | None:
    """Dtype in which frozen parameters are held; None: nothing is frozen. The widest, if they differ."""
    held = {parameter.dtype for parameter in module.parameters() if not parameter.requires_grad}
    return max(held, key=lambda dtype: dtype.itemsize, default=None)


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; a tied tensor counts once. Call it before sharding."""
    return sum(parameter.numel() for parameter in model.parameters())
