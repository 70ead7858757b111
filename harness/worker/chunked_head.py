"""An output layer that returns the loss of each token, some tokens at a time, in place of all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness.errors import JobError
from harness.worker.dataset import IGNORED
from harness.worker.outputs import logits_of


class ChunkedHead(nn.Linear):
    """A linear layer that computes logits and cross entropy of `chunk_tokens` tokens at once.

    The backward pass computes the logits of a chunk once more, so no two chunks' logits exist together.
    Without labels it is a linear layer.
    """

    chunk_tokens: int
    labels: Tensor | None = None
    returned: Tensor | None = None
    """What the last forward pass returned, to be known again."""

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (samples, length, width). Return the losses, fp32 (samples, length, 1)."""
        if self.labels is None:
            return super().forward(hidden)
        if hidden.shape[:-1] != self.labels.shape:
            raise JobError(
                f"loss.chunk_tokens: the output layer was given {tuple(hidden.shape[:-1])} positions, the "
                f"batch has {tuple(self.labels.shape)}; leave loss.chunk_tokens out for this model"
            )
        flat, labels = hidden.flatten(0, -2), self.labels.flatten()
        losses = [
            checkpoint(self._losses, rows, targets, use_reentrant=False)
            for rows, targets in zip(
                flat.split(self.chunk_tokens), labels.split(self.chunk_tokens), strict=True
            )
        ]
        self.returned = torch.cat(losses).view(*self.labels.shape, 1)
        return self.returned

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(hidden, self.weight, self.bias)
        return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")


def chunk_head(model: nn.Module, chunk_tokens: int) -> None:
    """Have the model's output layer compute the loss. Raises JobError for a model that has no linear one."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if type(head) is not nn.Linear:
        raise JobError(
            f"loss.chunk_tokens needs an output layer that is a plain nn.Linear; {type(model).__name__} has "
            f"{type(head).__name__ if head is not None else 'none'}. Leave it out"
        )
    head.__class__ = ChunkedHead
    head.chunk_tokens = chunk_tokens  # type: ignore[assignment]


def chunked_cross_entropy(module: nn.Module, inputs: dict[str, Any], targets: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over the targets that are not IGNORED, of a model whose head is chunked.

    inputs: what the model is called with. targets: int64 (samples, length), the token after each of them.
    Raises JobError for a model that does more to its logits than return them.
    """
    head = next(part for part in module.modules() if isinstance(part, ChunkedHead))
    head.labels = targets
    try:
        losses = logits_of(module(**inputs, use_cache=False))
        returned = head.returned
    finally:
        head.labels = head.returned = None
    # Wrappers may return a view, or another object of the same memory.
    if returned is None or losses.data_ptr() != returned.data_ptr() or losses.shape != returned.shape:
        raise JobError(
            f"loss.chunk_tokens: {type(module).__name__} changes its logits after the output layer; leave it "
            "out"
        )
    return losses.sum()
