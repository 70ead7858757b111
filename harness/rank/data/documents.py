"""Reads each data source as documents: a prompt that is not trained on, and a text that is."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.errors import JobError
from harness.job.job import DataSection, Job
from harness.rank.factories import one_at_a_time, why_refused
from harness.safe_text import encodable

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


class Tokenizer(ABC):
    """Text to token ids, with one id that ends a document and pads a batch."""

    vocabulary_size: int
    end_of_text: int
    padding: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""

    @abstractmethod
    def encode_input(self, text: str, second: str | None, length: int) -> dict[str, list[int]]:
        """Arguments of a model that reads a text, or a pair of texts, as a whole: at most `length` ids each.

        With the marks that the model was trained with; `input_ids` and what else the tokenizer gives.
        """

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, special ones left out."""


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8 and one end-of-text id."""

    vocabulary_size = 257
    end_of_text = padding = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_input(self, text: str, second: str | None, length: int) -> dict[str, list[int]]:
        ids = [*self.encode(text)[: length - 1], self.end_of_text]
        if second is not None:
            ids = [*(ids + self.encode(second))[: length - 1], self.end_of_text]
        return {"input_ids": ids}

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if t < self.end_of_text).decode("utf-8", errors="replace")


class HuggingFaceTokenizer(Tokenizer):
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
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            refused = why_refused(name, error, setting="model.name" if of_model else "data.tokenizer")
            if refused is not None:
                raise JobError(refused) from error
            if of_model:
                raise JobError(
                    f"model.name '{name}' cannot be loaded with its tokenizer: {first_line} Give a local "
                    "folder, a hub name this machine can reach, or another data.tokenizer"
                ) from error
            raise JobError(
                f"data.tokenizer '{name}' cannot be loaded: {first_line} "
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
            return _prose()
        case "text":
            return iter([TextSample(_read_text(data.path))])
        case "squad":
            return _squad(data)
        case "jsonl" | "json" | "csv" | "datasets":
            return (_document(data, row, where) for row, where in _rows(data))
        case "images" | "synthetic-images":
            raise JobError(f"data.source '{data.source}' has no text")


def read_labelled(data: DataSection) -> Iterator[tuple[TextSample, Any]]:
    """Yield each row's text and the class that `data.label_field` holds. Raises JobError."""
    for row, where in _rows(data):
        if row.get(data.label_field) is None:
            raise JobError(
                f"data.label_field is '{data.label_field}', but {where} of '{data.path}' has no value there; "
                f"its fields: {', '.join(map(str, row)) or 'none'}"
            )
        yield _document(data, row, where), row[data.label_field]


def _rows(data: DataSection) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows with where each stands."""
    return _json_lines(data) if data.source == "jsonl" else _datasets(data)


def _prose() -> Iterator[TextSample]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield TextSample(topics[name])


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
                f"data.{name} is '{field}', but {where} of '{data.path}' has no text there; its "
                f"fields: {', '.join(map(str, row)) or 'none'}"
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
        lines = str(error).strip().splitlines() or [repr(error)]
        raise JobError(
            f"data.path '{data.path}' (split '{data.split}') cannot be loaded by datasets: {lines[0]}"
        ) from error
    for index, row in enumerate(loaded):
        yield row, f"row {index}"
