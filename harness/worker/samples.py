"""Tokenised samples and their order: addressed by (step, micro-step, rank), equal for every world."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from harness.batch import BatchLayout
from harness.errors import JobError
from harness.spec import Job
from harness.worker.documents import Document, read_documents
from harness.worker.tokens import Tokenizer, load_tokenizer

IGNORED = -100
"""Label of a position that is no target: the ignore_index of torch's cross entropy."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of a job.

    tokens, labels: int64 (samples, sequence_length); label i belongs to token i, and position i is
    predicted from the tokens before it. lengths: tokens of each sample that are not padding.
    targets: labels of each sample that count, the first position never among them.
    """

    tokens: Tensor
    labels: Tensor
    lengths: Tensor
    targets: Tensor
    vocabulary_size: int

    def __len__(self) -> int:
        return self.tokens.shape[0]


def load_samples(job: Job) -> Samples:
    """Read, tokenise and cut the job's data.

    Raises JobError if there is none.
    """
    data = job.data
    tokenizer = load_tokenizer(data.tokenizer)
    documents = read_documents(data)
    if data.is_packed:
        tokens, labels = _packed(documents, tokenizer, data.sequence_length, data.limit)
    else:
        tokens, labels = _padded(documents, tokenizer, data.sequence_length)
    if data.limit is not None:
        tokens, labels = tokens[: data.limit], labels[: data.limit]
    source = f"data source '{data.source}'" + (f" ('{data.path}')" if data.path else "")
    if len(tokens) == 0:
        raise JobError(
            f"{source} gives no sample of {data.sequence_length} tokens; give more text or a smaller "
            "data.sequence_length"
        )
    return Samples(
        tokens=tokens,
        labels=labels,
        lengths=_lengths(tokens, labels),
        targets=(labels[:, 1:] != IGNORED).sum(dim=1),
        vocabulary_size=tokenizer.vocabulary_size,
    )


class Sampler:
    """Which samples each step trains on. Epochs are permuted by the seed alone."""

    def __init__(self, samples: Samples, job: Job) -> None:
        batch = job.training.global_batch_size
        assert batch is not None
        held_out = job.evaluation.samples if job.evaluation.every_steps else 0
        self.training_count = len(samples) - held_out
        if self.training_count < 1:
            raise JobError(
                f"the data has {len(samples)} samples and evaluation.samples holds out {held_out}: none "
                "is left to train on; give more data or hold out fewer"
            )
        self._samples = samples
        self.global_batch_size = batch
        self.evaluation_ids = list(range(self.training_count, len(samples)))
        self._shuffle = job.data.shuffle
        self._seed = job.training.seed
        self._permutations: dict[int, Tensor] = {}
        self._steps: dict[int, list[int]] = {}

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that data keeps in memory: the samples, and the order in which they are drawn."""
        samples = self._samples
        yield from (samples.tokens, samples.labels, samples.lengths, samples.targets)
        yield from self._permutations.values()

    def step_ids(self, step: int) -> list[int]:
        """Sample ids of the global batch of a step, in order; epochs follow each other without a gap."""
        if step not in self._steps:
            first = step * self.global_batch_size
            ids = [self._sample_id(first + i) for i in range(self.global_batch_size)]
            self._steps = {step: ids}
        return self._steps[step]

    def micro_batch_ids(
        self, step: int, micro_step: int, rank: int, world_size: int, layout: BatchLayout
    ) -> list[int]:
        """This rank's part of a global batch: micro-steps first, then ranks, then samples."""
        start = (micro_step * world_size + rank) * layout.micro_batch_size
        return self.step_ids(step)[start : start + layout.micro_batch_size]

    def _sample_id(self, position: int) -> int:
        epoch, index = divmod(position, self.training_count)
        return int(self._permutation(epoch)[index]) if self._shuffle else index

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(self.training_count, generator=generator)
            self._permutations = {epoch: order} | {
                e: p for e, p in self._permutations.items() if e == epoch - 1
            }
        return self._permutations[epoch]


def _packed(
    documents: Iterable[Document], tokenizer: Tokenizer, length: int, limit: int | None
) -> tuple[Tensor, Tensor]:
    """At least `limit` samples, if there are so many; every document is read, since one may be refused."""
    stream = array("q")
    for document in documents:
        if document.text and (limit is None or len(stream) < limit * length):
            stream.extend(tokenizer.encode(document.text))
            stream.append(tokenizer.end_of_text)
    count = len(stream) // length
    tokens = _outside_the_allocator(stream[: count * length], (count, length))
    return tokens, tokens


def _padded(documents: Iterable[Document], tokenizer: Tokenizer, length: int) -> tuple[Tensor, Tensor]:
    token_rows: list[list[int]] = []
    label_rows: list[list[int]] = []
    for document in documents:
        tokens, labels = _one_sample(document, tokenizer, length)
        if any(label != IGNORED for label in labels[1:]):
            token_rows.append(tokens)
            label_rows.append(labels)
    shape = (len(token_rows), length)
    return _outside_the_allocator(token_rows, shape), _outside_the_allocator(label_rows, shape)


def _outside_the_allocator(values: object, shape: tuple[int, int]) -> Tensor:
    """An int64 tensor in numpy's memory, so that the data set is no part of the training's memory."""
    return torch.from_numpy(numpy.array(values, dtype=numpy.int64).reshape(shape))


def _one_sample(document: Document, tokenizer: Tokenizer, length: int) -> tuple[list[int], list[int]]:
    """Prompt and text and an end, cut to `length`: the prompt from its left so that the text stays."""
    prompt = tokenizer.encode(document.prompt) if document.prompt else []
    text = [*tokenizer.encode(document.text), tokenizer.end_of_text][:length]
    room = length - len(text)
    prompt = prompt[len(prompt) - room :] if len(prompt) > room else prompt
    padding = length - len(prompt) - len(text)
    tokens = prompt + text + [tokenizer.end_of_text] * padding
    labels = [IGNORED] * len(prompt) + text + [IGNORED] * padding
    return tokens, labels


def _lengths(tokens: Tensor, labels: Tensor) -> Tensor:
    """Position after the last label; padding follows it, since a prompt never comes last."""
    positions = torch.arange(1, tokens.shape[1] + 1)
    return torch.where(labels != IGNORED, positions, 0).max(dim=1).values
