"""The loss of one rank's part of each sample, where ranks divide the sequence.

Every rank of such a group is given the whole samples and cuts its own part, so that what it was fed can be
compared with what every other strategy was fed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.backends.base import Batch, Unsupported, World
from harness.forms.workload import part_length
from harness.job.job import Job
from harness.job.pairs import why_refused_along
from harness.rank.data.samples import IGNORED, LABELS
from harness.rank.models.changes import chunked_cross_entropy, logits_of
from harness.rank.models.losses import ComputeLoss, token_cross_entropy


@dataclass(frozen=True, kw_only=True)
class SequencePart:
    """What one rank computes of its samples, each (samples, length of a part) but `positions`."""

    tokens: Tensor
    targets: Tensor
    """The token after each, IGNORED where that is none."""
    positions: Tensor
    """Places in the whole sample: (1, length of a part)."""


def cut(batch: Batch, index: int, parts: int) -> SequencePart:
    """Part `index` of `parts` equal ones of samples: `tokens` and `labels`, int64 (samples, length).

    Targets are the labels moved left by one before they are cut, so that the last token of a part still
    predicts the first of the next one. Samples whose length is no multiple of `parts` are padded on the
    right, where causal attention keeps padding away from every target.
    """
    tokens, labels = batch["tokens"], batch[LABELS]
    length = part_length(tokens.shape[1], parts)
    padding = length * parts - tokens.shape[1]
    targets = functional.pad(labels[:, 1:], (0, 1 + padding), value=IGNORED)
    positions = torch.arange(length * parts, device=tokens.device).unsqueeze(0)
    own = slice(index * length, (index + 1) * length)
    padded = functional.pad(tokens, (0, padding))
    return SequencePart(
        tokens=padded[:, own].contiguous(), targets=targets[:, own].contiguous(), positions=positions[:, own]
    )


def loss_of_part(world: World, *, in_chunks: bool = False) -> ComputeLoss:
    """Cross entropy of the next token summed over the targets of this rank's part: a scalar, fp32.

    in_chunks: the model's head is a ChunkedHead.
    """
    parts = world.mesh.size("sequence")
    index = world.mesh.coordinates(world.rank).get("sequence", 0)

    def compute(module: nn.Module, batch: Batch) -> Tensor:
        part = cut(batch, index, parts)
        inputs = {"input_ids": part.tokens, "position_ids": part.positions}
        if in_chunks:
            return chunked_cross_entropy(module, inputs, part.targets)
        return token_cross_entropy(logits_of(module(**inputs, use_cache=False)), part.targets)

    return compute


def divide_sequence(job: Job, model: nn.Module, world: World, whole: ComputeLoss) -> ComputeLoss:
    """The loss that a rank computes: `whole`, or that of its part where ranks divide the sequence.

    Raises Unsupported for jobs and models whose samples cannot be cut.
    """
    parts = world.mesh.size("sequence")
    if parts == 1:
        return whole
    if (reason := why_undivided(job, model, parts)) is not None:
        raise Unsupported(reason)
    return loss_of_part(world, in_chunks=job.loss.chunk_tokens is not None)


def why_undivided(job: Job, model: nn.Module, parts: int) -> str | None:
    """Why the samples of a job cannot be divided among ranks; None: they can."""
    if job.task != "causal-lm" or job.model.factory or job.loss.factory:
        return (
            "the harness divides the sequence of causal-lm samples for models of transformers only, not of "
            f"task '{job.task}'{', a model' if job.model.factory else ''}"
            f"{', a loss' if job.loss.factory else ''} of one's own"
        )
    if (refused := why_refused_along("sequence", job)) is not None:
        return refused
    forward: Callable[..., Any] = model.forward
    if "position_ids" not in inspect.signature(forward).parameters:
        return (
            f"{type(model).__name__} takes no position_ids, so it cannot tell where a part of a sample begins"
        )
    config: Any = getattr(model, "config", None)
    length = job.data.sequence_length
    padded = part_length(length, parts) * parts
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and padded > max(context, length):
        return (
            f"data.sequence_length {length} padded to {padded} for {parts} parts exceeds the model's "
            f"{context} positions; choose a multiple of {parts}"
        )
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and getattr(config, "use_sliding_window", True) and window < length:
        return (
            f"{type(model).__name__} attends within a window of {window} tokens; neither torch's "
            "context_parallel nor DeepSpeed's Ulysses takes masks, so attention would go beyond it"
        )
    return None
