"""Samples of task causal-lm: a stream of tokens cut into pieces, or one text each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from harness.spec import Job
from harness.spec.data import Targets
from harness.worker.dataset import IGNORED, LABELS, POSITIONS, DataFacts, Samples, outside_the_allocator
from harness.worker.documents import Document
from harness.worker.tokens import Tokenizer, tokenizer_of


def load_text(job: Job, documents: Iterable[Document]) -> Samples:
    """Tokenise and cut documents."""
    data = job.data
    tokenizer = tokenizer_of(job)
    positions: Tensor | None = None
    if data.is_packed:
        tokens, starts = _packed(documents, tokenizer, data.sequence_length, data.limit)
        labels = tokens
        if data.document_attention == "within":
            labels, positions = _kept_apart(tokens, starts)
    else:
        tokens, labels = _padded(documents, tokenizer, data.sequence_length, data.targets)
    if data.limit is not None:
        tokens, labels = tokens[: data.limit], labels[: data.limit]
        positions = None if positions is None else positions[: data.limit]
    return of_tokens(tokens, labels, DataFacts(vocabulary_size=tokenizer.vocabulary_size), positions)


def of_tokens(tokens: Tensor, labels: Tensor, facts: DataFacts, positions: Tensor | None = None) -> Samples:
    """tokens, labels: int64 (samples, length), each predicted from the tokens before it.

    positions: likewise, where several documents in a sample are kept apart.
    """
    return Samples(
        fields={"tokens": tokens, LABELS: labels} | ({} if positions is None else {POSITIONS: positions}),
        lengths=_lengths(tokens, labels)
        if positions is None
        else torch.full((len(tokens),), tokens.shape[1]),
        targets=(labels[:, 1:] != IGNORED).sum(dim=1),
        facts=facts,
    )


def _packed(
    documents: Iterable[Document], tokenizer: Tokenizer, length: int, limit: int | None
) -> tuple[Tensor, Tensor]:
    """At least `limit` samples, if there are so many; every document is read, since one may be refused.

    Return them, and where documents begin in their stream.
    """
    stream, starts = array("q"), array("q")
    for document in documents:
        if document.text and (limit is None or len(stream) < limit * length):
            starts.append(len(stream))
            stream.extend(tokenizer.encode(document.text))
            stream.append(tokenizer.end_of_text)
    count = len(stream) // length
    tokens = outside_the_allocator(stream[: count * length], (count, length))
    return tokens, outside_the_allocator(starts, (len(starts),))


def _kept_apart(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Labels without the first token of each document, and positions that restart there.

    A document that a sample begins within starts anew with it: what stood before is not there to attend to.
    """
    count, length = tokens.shape
    place = torch.arange(count * length)
    first = place % length == 0
    first[starts[starts < count * length]] = True
    begin = torch.where(first, place, 0).cummax(0).values
    shape = (count, length)
    labels = torch.where(first.view(shape), IGNORED, tokens)
    return outside_the_allocator(labels.numpy(), shape), outside_the_allocator((place - begin).numpy(), shape)


def _padded(
    documents: Iterable[Document], tokenizer: Tokenizer, length: int, targets: Targets
) -> tuple[Tensor, Tensor]:
    token_rows: list[list[int]] = []
    label_rows: list[list[int]] = []
    for document in documents:
        tokens, labels = _one_sample(document, tokenizer, length, targets)
        if any(label != IGNORED for label in labels[1:]):
            token_rows.append(tokens)
            label_rows.append(labels)
    shape = (len(token_rows), length)
    return outside_the_allocator(token_rows, shape), outside_the_allocator(label_rows, shape)


def _one_sample(
    document: Document, tokenizer: Tokenizer, length: int, targets: Targets = "text"
) -> tuple[list[int], list[int]]:
    """Prompt and text and an end, cut to `length`: the prompt from its left so that the text stays."""
    prompt = tokenizer.encode(document.prompt) if document.prompt else []
    text = [*tokenizer.encode(document.text), tokenizer.end_of_text][:length]
    room = length - len(text)
    prompt = prompt[len(prompt) - room :] if len(prompt) > room else prompt
    labels = {
        "text": [IGNORED] * len(prompt) + text,
        "all": prompt + text,
        "prompt": prompt,
        "text over prompt": ([IGNORED] * len(prompt) + text)[-len(prompt) :] if prompt else [],
    }[targets]
    tokens = prompt + text if targets in ("text", "all") else prompt
    return _to_length(tokens, length, tokenizer.end_of_text), _to_length(labels, length, IGNORED)


def _to_length(values: list[int], length: int, padding: int) -> list[int]:
    return values + [padding] * (length - len(values))


def _lengths(tokens: Tensor, labels: Tensor) -> Tensor:
    """Position after the last label; padding follows it, since a prompt never comes last."""
    positions = torch.arange(1, tokens.shape[1] + 1)
    return torch.where(labels != IGNORED, positions, 0).max(dim=1).values
