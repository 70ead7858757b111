"""Activation checkpointing of a model: which blocks recompute, and what they keep."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from harness.errors import JobError
from harness.forms.activations import SELECTIVE, blocks_between

KEPT_OPERATORS = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""Of torch's `aten`: matrix products and attention, whose outputs selective checkpointing keeps."""


def enable_checkpointing(model: Any, checkpointing: bool | str = True) -> None:
    """Have blocks recompute, as `training.activation_checkpointing` says.

    Raises JobError for a model that cannot, or not in part.
    """
    name = type(model).__name__
    enable = getattr(model, "activation_checkpointing_enable", None)
    older = getattr(model, "gradient_checkpointing_enable", None)
    if not getattr(model, "supports_gradient_checkpointing", True) or older is None:
        raise JobError(
            f"training.activation_checkpointing: {name} has no gradient checkpointing; set it to false"
        )
    if checkpointing is True:
        enable() if enable is not None else older(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    keywords: dict[str, Any] = {"activation_checkpointing_kwargs": {"use_reentrant": False}}
    if checkpointing == SELECTIVE:
        keywords["activation_checkpointing_kwargs"]["context_fn"] = _keeping_products()
    else:
        keywords["every_n_layers"] = blocks_between(checkpointing)
    if enable is None or not keywords.keys() <= inspect.signature(enable).parameters.keys():
        raise JobError(
            f"training.activation_checkpointing={checkpointing}: {name} recomputes every block or none; its "
            f"activation_checkpointing_enable takes no {' and '.join(keywords)}. Set true or false"
        )
    enable(**keywords)


def _keeping_products() -> Any:
    """A function of the two contexts that `torch.utils.checkpoint` runs a block in, first and again."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [op.default for name in KEPT_OPERATORS if (op := getattr(aten, name, None)) is not None]
    return partial(create_selective_checkpoint_contexts, kept)


def uses_checkpointing(model: nn.Module) -> bool:
    """Whether blocks recompute their activations; transformers 5 renamed the property."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    return False
