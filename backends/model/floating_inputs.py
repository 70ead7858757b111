"""Inputs that are no token ids, BatchNorm, complex parameters: what libraries leave to their callers."""

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
