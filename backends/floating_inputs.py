"""Models whose inputs are no token ids, and those with BatchNorm: what libraries leave to their callers."""

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
