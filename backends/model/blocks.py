"""Which modules of a model are wrapped as units; inputs, layers and parameters that libraries cannot take."""

from __future__ import annotations

import torch
from torch import nn

from harness.backends.base import Unsupported


def takes_tokens(model: nn.Module) -> bool:
    """Whether a model looks its inputs up in a table, as language models of transformers do."""
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # no model of transformers, or one of images
        return False


def refuse_batch_norm(model: nn.Module, library: str) -> None:
    """Raise Unsupported at mixed precision: weights of BatchNorm are cast, its statistics are not.

    FSDP1 wraps such layers as units of their own in fp32; DDP has autocast.
    """
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise Unsupported(
            f"{library} at mixed precision: weights of BatchNorm are cast and its statistics stay in fp32, "
            f"which no kernel of torch {torch.__version__} takes together; use ddp, fsdp1 or precision fp32"
        )


def refuse_complex(model: nn.Module, library: str) -> None:
    """Raise Unsupported for a library that flattens parameters into real tensors: imaginary parts are lost.

    FSDP2 keeps them in units that hold nothing else.
    """
    name = next((name for name, parameter in model.named_parameters() if parameter.is_complex()), None)
    if name is not None:
        raise Unsupported(
            f"{library} holds real numbers alone, and parameter '{name}' is complex; keep it as real numbers "
            "with a last dimension of 2 and view it in forward (torch.view_as_complex), or run ddp"
        )


def transformer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Map names to the blocks of a model, in order of execution; empty where it has none.

    Uses the class names that the model declares in `_no_split_modules`, as Accelerate and the Trainer do; the
    model itself is no block of it. FSDP makes one unit of a model without blocks, as torch does unless it is
    told otherwise (`auto_wrap_policy=None`, `fully_shard(model)`).
    """
    declared = set(getattr(model, "_no_split_modules", None) or ())
    declared |= {f"FSDP{name}" for name in declared}  # FSDP2 derives a class of its own
    return {name: m for name, m in model.named_modules() if name and type(m).__name__ in declared}


def needed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks of a model that must have some. Raises Unsupported where there are none."""
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


def names_by_id(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def places_of_tied(model: nn.Module) -> int:
    """How many places of parameters are further ones of a tensor."""
    return sum(1 for _ in model.named_parameters(remove_duplicate=False)) - len(list(model.parameters()))
