"""Models whose inputs are no token ids, and those with BatchNorm: what FSDP leaves to its caller for them."""

from __future__ import annotations

import torch
from torch import nn

from harness.backends.base import Unsupported


def takes_tokens(model: nn.Module) -> bool:
    """Whether a model looks its inputs up in a table, as language models of transformers do."""
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return False


def refuse_batch_norm(model: nn.Module) -> None:
    """Raise Unsupported: FSDP2 casts the weights of BatchNorm but not its statistics, and no kernel takes both.

    FSDP1 wraps such layers as units of their own in fp32.
    """
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise Unsupported(
            f"torch {torch.__version__}: FSDP2 at mixed precision casts the weights of BatchNorm and leaves its "
            "statistics in fp32, which no kernel takes together; use fsdp1, ddp or precision fp32"
        )
