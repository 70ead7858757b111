"""Samples that a function of the user's own returns, checked and made into tensors."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from harness.errors import JobError
from harness.spec import Job
from harness.worker.dataset import (
    LABELS,
    DataFacts,
    Samples,
    labels_that_count,
    one_per_sample,
    outside_the_allocator,
)
from harness.worker.factories import call_factory
from harness.worker.telling import tell
from harness.worker.text_samples import of_tokens

INPUT_IDS = "input_ids"
SILENT_SECONDS = 1.0
WHAT = "a sequence of samples, each a mapping of names to tensors, arrays or numbers"


def load_own_samples(job: Job) -> Samples:
    """Call `data.factory`, with every generator of random numbers at the job's seed, and stack its samples.

    Raises JobError for what is no sequence of samples of equal fields and shapes.
    """
    seed = job.training.seed
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    shown = f"data.factory '{job.data.factory}'"
    assert job.data.factory is not None
    rows = _rows(call_factory("data.factory", job.data.factory, job.data.arguments), shown, job)
    fields = {name: _stacked([row[name] for row in rows], name, shown) for name in rows[0]}
    return _of_task(fields, job, shown)


def _rows(returned: Any, shown: str, job: Job) -> list[Mapping[str, Any]]:
    if isinstance(returned, (str, bytes, Mapping, Tensor)) or not (
        isinstance(returned, Iterable) or hasattr(returned, "__getitem__")
    ):
        raise JobError(f"{shown} returned a {type(returned).__name__}; it must return {WHAT}")
    rows: list[Mapping[str, Any]] = []
    say_at: float | None = time.monotonic() + SILENT_SECONDS
    for row in _each(returned):
        if say_at is not None and time.monotonic() > say_at:
            say_at = None
            tell(
                f"{shown}: {len(rows):,} samples read so far; all are read before training: where the stream "
                "does not end, stop this with Ctrl-C and set data.limit"
            )
        if job.data.limit is not None and len(rows) == job.data.limit:
            break
        if job.task == "classification" and isinstance(row, (tuple, list)) and len(row) == 2:
            row = {"pixel_values": row[0], LABELS: row[1]}
        if not isinstance(row, Mapping) or not row:
            raise JobError(f"{shown}: sample {len(rows)} is a {type(row).__name__}; it must return {WHAT}")
        if rows and set(row) != set(rows[0]):
            raise JobError(
                f"{shown}: sample {len(rows)} has {', '.join(row)}, the first {', '.join(rows[0])}; give "
                "all samples the same fields"
            )
        rows.append(row)
    if not rows:
        raise JobError(f"{shown} returned no samples; it must return {WHAT}")
    return rows


def _each(returned: Any) -> Iterable[Any]:
    """A map-style data set has a length and items, and may not be iterable."""
    if hasattr(returned, "__len__") and hasattr(returned, "__getitem__"):
        return (returned[index] for index in range(len(returned)))
    return returned  # type: ignore[no-any-return]


def _stacked(values: Sequence[Any], name: str, shown: str) -> Tensor:
    try:
        arrays = [_array(value) for value in values]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            both = " and ".join(map(str, sorted(shapes)[:2]))
            raise JobError(
                f"{shown}: field '{name}' has shapes {both}; pad samples to one shape, labels with -100"
            )
        tensor = outside_the_allocator(numpy.stack(arrays))
    except (TypeError, ValueError) as error:
        raise JobError(
            f"{shown}: field '{name}' of type {type(values[0]).__name__} is no tensor, array or number: "
            f"{error}"
        ) from error
    if tensor.dtype is torch.float64:
        return outside_the_allocator(tensor.float().numpy())
    return tensor


def _array(value: Any) -> numpy.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else numpy.asarray(value)


def _of_task(fields: dict[str, Tensor], job: Job, shown: str) -> Samples:
    if job.task == "causal-lm":
        tokens = _required(fields, INPUT_IDS, job, shown)
        return of_tokens(tokens.long(), fields.get(LABELS, tokens).long(), DataFacts())
    count = len(next(iter(fields.values())))
    lengths, targets, facts = one_per_sample(count), one_per_sample(count), DataFacts()
    if job.task != "custom" or job.loss.targets == "labels":
        _required(fields, LABELS, job, shown)
    if job.task == "seq2seq":
        _required(fields, INPUT_IDS, job, shown)
    if job.task == "seq2seq" or (job.task == "custom" and job.loss.targets == "labels"):
        targets = labels_that_count(fields[LABELS])
    if job.task == "classification":
        fields[LABELS] = fields[LABELS].long()
        facts = DataFacts(classes=int(fields[LABELS].max()) + 1)
    if INPUT_IDS in fields:
        mask = fields.get("attention_mask", torch.ones_like(fields[INPUT_IDS]))
        if job.task == "seq2seq":
            fields["attention_mask"] = mask
        lengths = mask.long().sum(dim=1) + (targets if job.task == "seq2seq" else 0)
    return Samples(fields=fields, lengths=lengths, targets=targets, facts=facts)


def _required(fields: Mapping[str, Tensor], name: str, job: Job, shown: str) -> Tensor:
    if name not in fields:
        raise JobError(
            f"{shown}: samples of task {job.task} need a field '{name}'; these have {', '.join(fields)}"
        )
    return fields[name]
