"""The data of a job: documents, tokens, samples and their order.

A document is a prompt that is not trained on, and a text that is. Samples are addressed by (step, micro-step,
data rank), equal for every world.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from harness.backends.base import Batch
from harness.errors import JobError
from harness.job.batch import BatchLayout
from harness.job.job import DEFAULT_CLASSES, IMAGES, DataSection, Job, Targets
from harness.rank.factories import call_factory, one_at_a_time, why_refused
from harness.run_directory.events import tell
from harness.safe_text import encodable, first_line

SECONDS = 5.0
"""For an answer. Compute nodes often drop what would leave the cluster, which shows as silence."""


def settle_hub(name: str) -> None:
    """Have Hugging Face's libraries read their cache at once where the hub does not answer.

    They would try each file six times over 23 seconds, in every process. A local folder asks nobody.
    """
    if not Path(name).exists() and not _answers():
        import huggingface_hub.constants

        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        huggingface_hub.constants.HF_HUB_OFFLINE = True


@cache
def _answers() -> bool:
    import huggingface_hub.constants
    from huggingface_hub import get_session

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # of the library's HTTP client, which it replaced once
        return False
    return True


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip


class ByteTokenizer:
    """The 256 byte values of UTF-8 and one id that ends a document and pads a batch."""

    vocabulary_size = 257
    end_of_text = padding = 256

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""
        return list(text.encode("utf-8"))

    def encode_input(self, text: str, second: str | None, length: int) -> dict[str, list[int]]:
        """Arguments of a model that reads a text, or a pair of texts, as a whole: at most `length` ids each.

        With the marks that the model was trained with; `input_ids` and what else the tokenizer gives.
        """
        ids = [*self.encode(text)[: length - 1], self.end_of_text]
        if second is not None:
            ids = [*(ids + self.encode(second))[: length - 1], self.end_of_text]
        return {"input_ids": ids}

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, special ones left out."""
        return bytes(t for t in tokens if t < self.end_of_text).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """`AutoTokenizer`; `runs_code`: whether code that it brings may run."""

    def __init__(
        self, name: str, revision: str | None = None, *, of_model: bool = False, runs_code: bool = False
    ) -> None:
        from transformers import AutoTokenizer

        settle_hub(name)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=runs_code
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            refused = why_refused(name, error, setting="model.name" if of_model else "data.tokenizer")
            if refused is not None:
                raise JobError(refused) from error
            if of_model:
                raise JobError(
                    f"model.name '{name}' cannot be loaded with its tokenizer: {first_line(error)} "
                    "Give a local folder, a hub name this machine can reach, or another data.tokenizer"
                ) from error
            raise JobError(
                f"data.tokenizer '{name}' cannot be loaded: {first_line(error)} "
                "Give 'bytes', a local tokenizer folder, or a hub name this machine can reach"
            ) from error
        self.vocabulary_size = len(self._tokenizer)
        end = self._tokenizer.eos_token_id
        self.end_of_text = end if end is not None else (self._tokenizer.pad_token_id or 0)
        pad = self._tokenizer.pad_token_id
        self.padding = self.end_of_text if pad is None else pad

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_input(self, text: str, second: str | None, length: int) -> dict[str, list[int]]:
        encoded = self._tokenizer(text, second, truncation=True, max_length=length)
        return {name: list(ids) for name, ids in encoded.items() if name != "attention_mask"}

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer of a job. Raises JobError, also for a model by name that comes without one."""
    name = job.data.tokenizer
    if name != job.model.name:
        return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in TOKENIZER_FILES):
        raise JobError(
            f"model.name '{name}' is a folder without a tokenizer ({', '.join(TOKENIZER_FILES)}): save the "
            "model's own there, name one with data.tokenizer, or set data.tokenizer to bytes to feed it "
            "raw bytes"
        )
    with one_at_a_time(job):
        return HuggingFaceTokenizer(
            name, job.model.revision, of_model=True, runs_code=job.model.trust_remote_code
        )


@dataclass(frozen=True)
class TextSample:
    """A text whose tokens are targets, after a prompt whose tokens are not."""

    text: str
    prompt: str = ""
    answers: tuple[str, ...] = ()
    """Every right answer, of which `text` is the first; none: it is no question."""


def read_documents(data: DataSection) -> Iterator[TextSample]:
    """Yield the documents of a source in their order. Raises JobError if they cannot be read."""
    match data.source:
        case "prose":
            from pydoc_data.topics import topics

            return (TextSample(topics[name]) for name in sorted(topics))
        case "text":
            return iter([TextSample(_read_text(data.path))])
        case "squad":
            return _squad(data)
        case "jsonl" | "json" | "csv" | "datasets":
            return (_document(data, row, where) for row, where in _rows(data))
        case "images" | "synthetic-images":
            raise JobError(f"data.source '{data.source}' has no text")


def _rows(data: DataSection) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows with where each stands."""
    return _json_lines(data) if data.source == "jsonl" else _datasets(data)


def _read_text(path: str | None) -> str:
    assert path is not None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise JobError(
            f"data.path '{path}' cannot be read: {error.strerror}; give an existing file"
        ) from error
    except UnicodeDecodeError as error:
        raise JobError(f"data.path '{path}' is not UTF-8 text (byte {error.start})") from error


def _json_lines(data: DataSection) -> Iterator[tuple[Mapping[str, Any], str]]:
    for number, line in enumerate(_read_text(data.path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise JobError(f"data.path '{data.path}', line {number}: not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise JobError(f"data.path '{data.path}', line {number}: not a JSON object")
        yield row, f"line {number}"


def _text(value: str, path: str | None, where: str) -> str:
    """The text. Raises JobError for half of a pair of surrogates, which JSON can spell and no text has."""
    if encodable(value) != value:
        lone = next(character for character in value if encodable(character) != character)
        raise JobError(
            f"data.path '{path}', {where}: a lone surrogate, \\u{ord(lone):04x}, is no character; write the "
            "whole pair, or take it out"
        )
    return value


def _document(data: DataSection, row: Mapping[str, Any], where: str) -> TextSample:
    values = []
    for name, field in (("text_field", data.text_field), ("prompt_field", data.prompt_field)):
        if field is None:
            values.append("")
            continue
        value = row.get(field)
        if not isinstance(value, str):
            raise JobError(
                f"data.{name} is '{field}', but {where} of '{data.path}' has no text there; give "
                f"one of its fields: {', '.join(map(str, row)) or 'none'}"
            )
        values.append(_text(value, data.path, where))
    return TextSample(text=values[0], prompt=values[1])


def _squad(data: DataSection) -> Iterator[TextSample]:
    """One document per question: context and question as the prompt, the first answer as the text."""
    count = 0
    try:
        articles = json.loads(_read_text(data.path))["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    if question["answers"]:
                        count += 1
                        where = f"question {count}"
                        prompt = f"{paragraph['context']}\nQuestion: {question['question']}\nAnswer:"
                        answers = [_text(answer["text"], data.path, where) for answer in question["answers"]]
                        yield TextSample(
                            prompt=_text(prompt, data.path, where), text=f" {answers[0]}",
                            answers=tuple(answers),
                        )  # fmt: skip
    except json.JSONDecodeError as error:
        raise JobError(f"data.path '{data.path}' is not JSON: {error.msg}") from error
    except (KeyError, TypeError, IndexError) as error:
        raise JobError(
            f"data.path '{data.path}' is not in the SQuAD v1.1 layout (data, paragraphs, qas, answers): "
            f"{type(error).__name__} {error}"
        ) from error


def _datasets(data: DataSection) -> Iterator[tuple[Mapping[str, Any], str]]:
    assert data.path is not None
    settle_hub(data.path)
    import datasets  # after it: reads then whether the hub may be asked

    try:
        if data.source in ("json", "csv"):
            loaded = datasets.load_dataset(data.source, data_files=data.path, split="train")
        elif (Path(data.path) / "state.json").exists() or (Path(data.path) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(data.path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[data.split]
        else:
            loaded = datasets.load_dataset(data.path, data.configuration, split=data.split)
    except Exception as error:  # the library raises a dozen unrelated types here
        raise JobError(
            f"data.path '{data.path}' (split '{data.split}') cannot be loaded by datasets: "
            f"{first_line(error)}"
        ) from error
    for index, row in enumerate(loaded):
        yield row, f"row {index}"


# Odd constants that spread bits over 64 (Steele, Lea, Flood, 'Fast splittable pseudorandom number
# generators', 2014), as signed integers.
_TOKEN = 0x9E3779B97F4A7C15 - 2**64
_LABEL = 0xBF58476D1CE4E5B9 - 2**64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""
_MIX = 0x94D049BB133111EB - 2**64


class SeenBatch:
    """A batch that reached a model: noted while the step runs, read once its clock has stopped."""

    def __init__(self, batch: Batch) -> None:
        self._batch = dict(batch)
        self._as_fed = self._versions()

    def content_sum(self) -> int | None:
        """`content_sum` of what the model was given; None if it was overwritten since then."""
        return int(content_sum(self._batch)) if self._versions() == self._as_fed else None

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self._batch.values()]


def batch_hash_sum(batches: Iterable[SeenBatch]) -> int | None:
    """Sum modulo 2^64 over batches; None: one of them was overwritten."""
    sums = [batch.content_sum() for batch in batches]
    return None if None in sums else sum(s for s in sums if s is not None) % 2**64


def content_digests(batch: Batch) -> list[str]:
    """A digest of each sample, from tensors of (samples, ...) on any device; synchronises with it."""
    found = []
    for values in zip(*(tensor.cpu() for tensor in batch.values()), strict=True):
        digest = hashlib.blake2b(digest_size=8)
        for value in values:
            # NumPy knows neither bfloat16 nor the kinds of float8.
            # Not by `numpy()`: the script could not resize the memory any more.
            held = value.resolve_conj().reshape(-1).contiguous().view(torch.uint8)
            digest.update(numpy.from_dlpack(held).tobytes())
        found.append(digest.hexdigest())
    return found


def content_sum(batch: Batch) -> Tensor:
    """The sum modulo 2^64 of a hash of each sample: int64, a scalar on the samples' device.

    batch: tensors of (samples, ...); fields count in their order.
    """
    total = None
    for tensor in batch.values():
        rows = _row_hashes(tensor)
        total = rows if total is None else (total ^ (total >> 29)) * _LABEL + rows
    assert total is not None
    return ((total ^ (total >> 31)) * _MIX).sum()


def _row_hashes(tensor: Tensor) -> Tensor:
    """int64 (samples): of the bits of each sample's elements and their places."""
    values = as_integers(tensor)
    # Integer products wrap around, so a position's weight is its number times an odd constant.
    position = torch.arange(1, values.shape[1] + 1, device=values.device)
    mixed = (values + position * _TOKEN) * _MIX
    return (mixed ^ (mixed >> 32)).sum(dim=1)


def as_integers(tensor: Tensor) -> Tensor:
    """int64 (samples, elements) that are equal where bits are."""
    flat = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).flatten(1)
    if flat.is_floating_point():
        flat = flat.contiguous().view(_BITS[flat.element_size()])
    return flat.long()


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
    """Number of labels that count in each sample; labels: (samples, ...)."""
    return (labels != IGNORED).reshape(len(labels), -1).sum(dim=1)


def load_text(job: Job, documents: Iterable[TextSample]) -> Samples:
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
        every = (_one_sample(one, tokenizer, data.sequence_length, data.targets) for one in documents)
        rows = [row for row in every if any(label != IGNORED for label in row[1][1:])]
        shape = (len(rows), data.sequence_length)
        tokens, labels = (outside_the_allocator([row[place] for row in rows], shape) for place in (0, 1))
    if data.limit is not None:
        tokens, labels = tokens[: data.limit], labels[: data.limit]
        positions = None if positions is None else positions[: data.limit]
    return of_tokens(tokens, labels, DataFacts(vocabulary_size=tokenizer.vocabulary_size), positions)


def of_tokens(tokens: Tensor, labels: Tensor, facts: DataFacts, positions: Tensor | None = None) -> Samples:
    """tokens, labels: int64 (samples, length), each predicted from the tokens before it.

    positions: likewise, where several documents in a sample are kept apart.
    """
    # A sample is as long as its last label: padding follows it, since a prompt never comes last.
    places = torch.arange(1, tokens.shape[1] + 1)
    ends = torch.where(labels != IGNORED, places, 0).max(dim=1).values
    return Samples(
        fields={"tokens": tokens, LABELS: labels} | ({} if positions is None else {POSITIONS: positions}),
        lengths=ends if positions is None else torch.full((len(tokens),), tokens.shape[1]),
        targets=(labels[:, 1:] != IGNORED).sum(dim=1),
        facts=facts,
    )


def _packed(
    documents: Iterable[TextSample], tokenizer: Tokenizer, length: int, limit: int | None
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


def _one_sample(
    document: TextSample, tokenizer: Tokenizer, length: int, targets: Targets = "text"
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
    padding = length - len(tokens)
    return tokens + [tokenizer.end_of_text] * padding, labels + [IGNORED] * (length - len(labels))


def load_pairs(job: Job, documents: Iterable[TextSample]) -> Samples:
    """Samples of seq2seq: the prompt is the input, the text the target.

    input_ids, attention_mask: (samples, sequence_length); labels: (samples, target_length), -100 where the
    target has ended. Both are cut at their ends.
    """
    data, tokenizer = job.data, tokenizer_of(job)
    length = data.target_length or data.sequence_length
    inputs: list[dict[str, list[int]]] = []
    targets: list[list[int]] = []
    for document in documents:
        if data.limit is not None and len(inputs) == data.limit:
            break
        if document.text:
            inputs.append(tokenizer.encode_input(document.prompt, None, data.sequence_length))
            targets.append(tokenizer.encode_input(document.text, None, length)["input_ids"])
    fields = _padded_inputs(inputs, tokenizer, data.sequence_length)
    labels = outside_the_allocator(
        [ids + [IGNORED] * (length - len(ids)) for ids in targets], (len(targets), length)
    )
    counted = labels_that_count(labels)
    return Samples(
        fields=fields | {LABELS: labels},
        lengths=fields["attention_mask"].sum(dim=1) + counted,
        targets=counted,
        facts=DataFacts(vocabulary_size=tokenizer.vocabulary_size, padding=tokenizer.padding),
    )


def load_classified(job: Job) -> Samples:
    """Samples of a classification of texts, or of pairs of texts.

    input_ids, attention_mask: (samples, sequence_length); labels: (samples). Names of classes are numbered in
    the order of the alphabet.
    """
    data, tokenizer = job.data, tokenizer_of(job)
    inputs: list[dict[str, list[int]]] = []
    values: list[Any] = []
    for row, where in _rows(data):
        if row.get(data.label_field) is None:
            raise JobError(
                f"data.label_field is '{data.label_field}', but {where} of '{data.path}' has no value there; "
                f"give one of its fields: {', '.join(map(str, row)) or 'none'}"
            )
        document = _document(data, row, where)
        if data.limit is None or len(inputs) < data.limit:
            first, second = (document.prompt, document.text) if data.prompt_field else (document.text, None)
            inputs.append(tokenizer.encode_input(first, second, data.sequence_length))
        values.append(row[data.label_field])
    labels = class_numbers(values, f"data.label_field '{data.label_field}' of '{data.path}'")
    fields = _padded_inputs(inputs, tokenizer, data.sequence_length)
    return Samples(
        fields=fields | {LABELS: outside_the_allocator(labels[: len(inputs)], (len(inputs),))},
        lengths=fields["attention_mask"].sum(dim=1),
        targets=one_per_sample(len(inputs)),
        facts=DataFacts(
            vocabulary_size=tokenizer.vocabulary_size,
            classes=max(labels, default=0) + 1,
            padding=tokenizer.padding,
        ),
    )


def class_numbers(values: Sequence[Any], where: str) -> list[int]:
    """Numbers from 0 of classes given as numbers or names. Raises JobError for a mixture or other values."""
    if all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values):
        return list(values)
    if all(isinstance(value, str) for value in values):
        numbers = {name: number for number, name in enumerate(sorted(set(values)))}
        return [numbers[value] for value in values]
    kinds = sorted({"a negative number" if isinstance(v, int) else type(v).__name__ for v in values})
    raise JobError(
        f"{where} must hold a class in every row, all numbers from 0 or all names; it holds "
        f"{', '.join(kinds)}"
    )


def _padded_inputs(
    inputs: Sequence[dict[str, list[int]]], tokenizer: Tokenizer, length: int
) -> dict[str, torch.Tensor]:
    """Fields by name and the mask of what is not padding; those of the mask and of segments pad with 0."""
    names = dict.fromkeys(name for row in inputs for name in row) or {"input_ids": None}
    padding = {"input_ids": tokenizer.padding}
    fields = {
        name: [row[name] + [padding.get(name, 0)] * (length - len(row[name])) for row in inputs]
        for name in names
    }
    fields["attention_mask"] = [
        [1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in inputs
    ]
    return {name: outside_the_allocator(rows, (len(inputs), length)) for name, rows in fields.items()}


CHANNELS = 3
SYNTHETIC_IMAGES = 256
"""Unless `data.limit` says otherwise."""
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm")


def load_images(job: Job) -> Samples:
    """pixel_values: fp32 (samples, 3, image_size, image_size) from -1 to 1; labels: (samples).

    Synthetic ones are one random pattern per class, and noise; classes follow each other. Raises JobError for
    a folder without classes or pictures that cannot be read.
    """
    data = job.data
    if data.source == "synthetic-images":
        generator = torch.Generator().manual_seed(job.training.seed)
        classes, count = data.classes or DEFAULT_CLASSES, data.limit or SYNTHETIC_IMAGES
        shape = (CHANNELS, data.image_size, data.image_size)
        patterns = torch.rand((classes, *shape), generator=generator)
        numbers = torch.arange(count) % classes
        noise = torch.rand((count, *shape), generator=generator)
        images, labels = (patterns[numbers] + noise - 1).numpy(), numbers.numpy()
    else:
        images, labels, classes = _from_folder(data)
    return Samples(
        fields={"pixel_values": outside_the_allocator(images), LABELS: outside_the_allocator(labels)},
        lengths=one_per_sample(len(labels)),
        targets=one_per_sample(len(labels)),
        facts=DataFacts(classes=classes),
    )


def _from_folder(data: DataSection) -> tuple[numpy.ndarray, numpy.ndarray, int]:
    """Pictures of FOLDER/CLASS/*, classes numbered in the order of the alphabet, spread evenly by a limit."""
    from PIL import Image

    assert data.path is not None
    folder = Path(data.path)
    classes = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = [
        (file, number)
        for number, path in enumerate(classes)
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in ENDINGS
    ]
    if not found:
        raise JobError(
            f"data.path '{data.path}' has no pictures: source images reads FOLDER/CLASS/PICTURE with "
            f"{', '.join(ENDINGS)}"
        )
    step = len(found) / min(len(found), data.limit or len(found))
    chosen = [found[int(index * step)] for index in range(round(len(found) / step))]
    size = (data.image_size, data.image_size)
    images = numpy.empty((len(chosen), CHANNELS, *size), dtype=numpy.float32)
    for index, (file, _) in enumerate(chosen):
        try:
            with Image.open(file) as picture:
                pixels = numpy.asarray(picture.convert("RGB").resize(size), dtype=numpy.float32)
        except OSError as error:
            raise JobError(f"picture '{file}' cannot be read: {error}") from error
        images[index] = pixels.transpose(2, 0, 1) / 127.5 - 1
    return images, numpy.array([number for _, number in chosen], dtype=numpy.int64), len(classes)


INPUT_IDS = "input_ids"
SILENT_SECONDS = 1.0
WHAT = "a sequence of samples, each a mapping of names to tensors, arrays or numbers"


def seed_generators(seed: int) -> None:
    """Bring every generator of random numbers that code of the user's own may use to this seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def load_own_samples(job: Job) -> Samples:
    """Call `data.factory`, with every generator of random numbers at the job's seed, and stack its samples.

    Raises JobError for what is no sequence of samples of equal fields and shapes.
    """
    seed_generators(job.training.seed)
    shown = f"data.factory '{job.data.factory}'"
    assert job.data.factory is not None
    rows = _samples_rows(call_factory("data.factory", job.data.factory, job.data.arguments), shown, job)
    fields = {name: _stacked([row[name] for row in rows], name, shown) for name in rows[0]}
    return _of_task(fields, job, shown)


def _samples_rows(returned: Any, shown: str, job: Job) -> list[Mapping[str, Any]]:
    if isinstance(returned, (str, bytes, Mapping, Tensor)) or not (
        isinstance(returned, Iterable) or hasattr(returned, "__getitem__")
    ):
        raise JobError(f"{shown} returned a {type(returned).__name__}; it must return {WHAT}")
    rows: list[Mapping[str, Any]] = []
    say_at: float | None = time.monotonic() + SILENT_SECONDS
    # A map-style data set has a length and items, and may not be iterable.
    has_items = hasattr(returned, "__len__") and hasattr(returned, "__getitem__")
    for row in (returned[index] for index in range(len(returned))) if has_items else returned:
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


def _stacked(values: Sequence[Any], name: str, shown: str) -> Tensor:
    try:
        arrays = [
            value.detach().cpu().numpy() if isinstance(value, Tensor) else numpy.asarray(value)
            for value in values
        ]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            both = " and ".join(map(str, sorted(shapes)[:2]))
            raise JobError(
                f"{shown}: field '{name}' has shapes {both}; pad samples to one shape, labels with -100"
            )
        tensor = outside_the_allocator(numpy.stack(arrays))
    except (TypeError, ValueError) as error:
        raise JobError(
            f"{shown}: field '{name}' of type {type(values[0]).__name__} is not a tensor, array or number: "
            f"{error}"
        ) from error
    if tensor.dtype is torch.float64:
        return outside_the_allocator(tensor.float().numpy())
    return tensor


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


def load_samples(job: Job) -> Samples:
    """Read the job's data, tokenise and cut text.

    Raises JobError if there is none.
    """
    data = job.data
    if data.factory is not None:
        samples = load_own_samples(job)
    elif data.source in IMAGES:
        samples = load_images(job)
    elif job.task == "classification":
        samples = load_classified(job)
    elif job.task == "seq2seq":
        samples = load_pairs(job, read_documents(data))
    else:
        samples = load_text(job, read_documents(data))
    source = f"data source '{data.source}'" + (f" ('{data.path}')" if data.path else "")
    if len(samples) == 0:
        if data.factory is not None or not data.is_packed:
            raise JobError(f"{data.factory or source} gives no sample; give more data")
        raise JobError(
            f"{source} gives no sample of {data.sequence_length} tokens; give more text or a smaller "
            "data.sequence_length"
        )
    return samples


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
        yield from (*samples.fields.values(), samples.lengths, samples.targets)
        yield from self._permutations.values()

    def step_ids(self, step: int) -> list[int]:
        """Sample ids of the global batch of a step, in order; epochs follow each other without a gap."""
        if step not in self._steps:
            places = range(step * self.global_batch_size, (step + 1) * self.global_batch_size)
            found = [divmod(place, self.training_count) for place in places]
            ids = [int(self._permutation(e)[i]) if self._shuffle else i for e, i in found]
            self._steps = {step: ids}
        return self._steps[step]

    def micro_batch_ids(
        self, step: int, micro_step: int, data_rank: int, data_size: int, layout: BatchLayout
    ) -> list[int]:
        """A data rank's part of a global batch: micro-steps first, then data ranks, then samples."""
        start = (micro_step * data_size + data_rank) * layout.micro_batch_size
        return self.step_ids(step)[start : start + layout.micro_batch_size]

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(self.training_count, generator=generator)
            self._permutations = {epoch: order} | {
                e: p for e, p in self._permutations.items() if e == epoch - 1
            }
        return self._permutations[epoch]


def to_device(batch: Batch, device: str) -> Batch:
    """The batch on `device`, 'cpu' or 'cuda', queued behind what the device still has to do.

    From pageable memory the copy would first wait for all of that, and the time of fetching data would hold
    the device's own. The caching host allocator keeps a pinned copy until the device has read it.
    """
    if device == "cpu":
        return batch
    return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}
