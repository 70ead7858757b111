"""All samples of a job as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from harness.backends.base import Batch

POSITIONS = "positions"
"""Field of samples whose tokens attend within their own document only: each token's place in that."""
IGNORED = -100
"""Label of a position that is no target: the ignore_index of torch's cross entropy."""
LABELS = "labels"


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a model needs to know of the data."""

    vocabulary_size: int | None = None
    """Ids of the tokenizer; None: the samples are no tokens, or of a factory that does not say."""
    classes: int | None = None
    """Of a classification."""
    padding: int | None = None
    """Id that pads a text."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of a job.

    fields: by name, tensors of (samples, ...). Of causal-lm `tokens` and `labels`, int64 (samples,
    sequence_length); label i belongs to token i, and position i is predicted from the tokens before it. Of
    other tasks the arguments of the model's forward pass, and `labels`.
    lengths: tokens of each sample that are not padding; 1 where samples are no text.
    targets: of each sample, how many of its labels count; a step's loss is the mean over them.
    """

    fields: Mapping[str, Tensor]
    lengths: Tensor
    targets: Tensor
    facts: DataFacts = DataFacts()

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, ids: Sequence[int]) -> Batch:
        """These samples, on the CPU, in new memory."""
        return {name: tensor[list(ids)] for name, tensor in self.fields.items()}


def outside_the_allocator(values: object, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor in numpy's memory, int64 if `shape` is given: the data set is no part of training's memory."""
    if shape is None:
        return torch.from_numpy(numpy.ascontiguousarray(values))  # type: ignore[call-overload]
    return torch.from_numpy(numpy.array(values, dtype=numpy.int64).reshape(tuple(shape)))


def one_per_sample(count: int) -> Tensor:
    """Lengths, or targets, of samples that count one each."""
    return torch.ones(count, dtype=torch.int64)


def labels_that_count(labels: Tensor) -> Tensor:
    """Of each sample; labels: (samples, ...)."""
    return (labels != IGNORED).reshape(len(labels), -1).sum(dim=1)
