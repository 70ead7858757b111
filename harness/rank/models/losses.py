"""The loss of a batch for each task, summed over its targets: the loop alone makes it a mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.backends.base import Batch, Unsupported, World
from harness.errors import JobError
from harness.forms.workload import part_length
from harness.job.job import Job
from harness.job.pairs import why_refused_along
from harness.rank.data import IGNORED, LABELS, POSITIONS
from harness.rank.factories import call_factory, configuration
from harness.rank.models.changes import chunked_cross_entropy, logits_of

KEEP_APART = ("gpt2", "llama", "mistral", "qwen2")
"""Model types whose causal mask follows positions that restart (transformers 5.23, masking_utils.py,
`find_packed_sequence_indices`), as tests hold: a document's logits are those that it has alone."""


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """Arguments of a causal model's forward pass; positions that restart keep documents apart."""
    inputs = {"input_ids": batch["tokens"]}
    return inputs | ({"position_ids": batch[POSITIONS]} if POSITIONS in batch else {})


MASKING = "transformers.masking_utils"
"""What makes masks from positions; transformers before 4.53 lacks it, and leaves documents together."""


@contextmanager
def unpacked_samples() -> Iterator[None]:
    """Tell transformers that samples are not packed: of fake tensors it would read the positions' values."""
    if find_spec(MASKING) is None:
        yield
        return
    with patch(f"{MASKING}.find_packed_sequence_indices", lambda *_, **__: None):
        yield


ComputeLoss = Callable[[nn.Module, Batch], Tensor]


def summed_cross_entropy(module: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the next token, summed over the batch's target tokens: a scalar, fp32.

    batch: `tokens` and `labels`, int64 (samples, length). Padding stands on the right, so causal
    attention keeps it away from every target and no mask is needed.
    """
    return _of_next_token(module(**inputs_of(batch), use_cache=False), batch)


def loss_function(job: Job, model: nn.Module) -> ComputeLoss:
    """The function that returns the loss of a batch, summed over its targets: a scalar.

    model: the bare model. Raises JobError for a factory that returns no such function.
    """
    if job.loss.factory is not None:
        return _own(job)
    config: Any = getattr(model, "config", None)
    if job.data.document_attention == "within":
        if find_spec(MASKING) is None:
            raise JobError("data.document_attention=within needs transformers 4.53 or newer; use across")
        known = getattr(configuration(model), "model_type", None)
        if job.model.factory is not None or known not in KEEP_APART:
            raise JobError(
                f"data.document_attention=within: whether {type(model).__name__} keeps documents apart is "
                f"not known; use a model of type {', '.join(KEEP_APART)}, or across"
            )
    if job.loss.chunk_tokens is not None:
        return _in_chunks
    if job.task == "causal-lm" and not job.model.factory:
        return summed_cross_entropy
    if job.task == "causal-lm":
        return lambda module, batch: _of_next_token(module(input_ids=batch["tokens"]), batch)
    if job.task == "seq2seq":
        return _seq2seq(config, {} if job.model.factory else {"use_cache": False})
    return _class if job.task == "classification" else _checked(_own_output, job)


def _in_chunks(module: nn.Module, batch: Batch) -> Tensor:
    targets = functional.pad(batch[LABELS][:, 1:], (0, 1), value=IGNORED)
    return chunked_cross_entropy(module, inputs_of(batch), targets)


def _of_next_token(output: Any, batch: Batch) -> Tensor:
    return token_cross_entropy(logits_of(output)[:, :-1], batch[LABELS][:, 1:])


def _class(module: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the class; labels: (samples)."""
    inputs = {name: value for name, value in batch.items() if name != LABELS}
    return token_cross_entropy(logits_of(module(**inputs)), batch[LABELS])


def _seq2seq(config: Any, arguments: dict[str, Any]) -> ComputeLoss:
    """Cross entropy of the target's tokens, each predicted from the input and the target before it.

    The decoder reads the target moved right by one, as transformers' `shift_tokens_right` does.
    """
    padding = int(getattr(config, "pad_token_id", None) or 0)
    start = getattr(config, "decoder_start_token_id", None)

    def compute(module: nn.Module, batch: Batch) -> Tensor:
        labels = batch[LABELS]
        decoder = labels.new_full(labels.shape, padding if start is None else int(start))
        decoder[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, padding)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        output = module(**inputs, decoder_input_ids=decoder, **arguments)
        return token_cross_entropy(logits_of(output), labels)

    return compute


def _checked(compute: Callable[[nn.Module, Batch], Any], job: Job) -> ComputeLoss:
    """A loss of the user's own: checked to be a scalar, and made a sum."""

    def checked(module: nn.Module, batch: Batch) -> Tensor:
        loss = compute(module, batch)
        shown = f"loss.factory '{job.loss.factory}'" if job.loss.factory else "the model's `loss`"
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise JobError(f"{shown}: the loss of a batch is {what}; it must be a scalar tensor")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise JobError(
                f"{shown}: the loss of a batch needs no gradient; compute it from the model's output"
            )
        loss = loss.reshape(()).float()
        return loss if job.loss.reduction == "sum" else loss * targets_of(batch, job)

    return checked


def targets_of(batch: Batch, job: Job) -> Tensor | int:
    """How many targets a batch has: what a mean over it was divided by."""
    if job.task == "causal-lm":
        return (batch[LABELS][:, 1:] != IGNORED).sum()
    if job.task == "seq2seq" or (job.task == "custom" and job.loss.targets == "labels"):
        return (batch[LABELS] != IGNORED).sum()
    return len(next(iter(batch.values())))


def returns_loss(job: Job, model: nn.Module) -> bool:
    """Whether a model that is given the labels too returns a loss that can stand beside the job's."""
    plain = job.task != "custom" and job.loss.factory is None and job.loss.chunk_tokens is None
    return plain and configuration(model) is not None and "labels" in signature(model.forward).parameters


def _own(job: Job) -> ComputeLoss:
    assert job.loss.factory is not None
    compute = call_factory("loss.factory", job.loss.factory, job.loss.arguments)
    shown, kind = f"loss.factory '{job.loss.factory}'", type(compute).__name__
    if not callable(compute):
        raise JobError(f"{shown} returned a {kind}; it must return a function of (model, batch)")
    try:
        signature(compute).bind(None, None)
    except TypeError as error:
        raise JobError(
            f"{shown} returned a function of {signature(compute)}; it must take (model, batch)"
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    return _checked(compute, job)


def _own_output(module: nn.Module, batch: Batch) -> Any:
    """What the model itself says is its loss."""
    output = module(**batch)
    if isinstance(output, dict):
        return output.get("loss")
    return getattr(output, "loss", output)


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over the labels that are not IGNORED.

    logits: (..., classes); labels: int64 (...).
    """
    return functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


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
