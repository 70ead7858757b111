"""Reads each data source as documents: a prompt that is not trained on, and a text that is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import JobError
from harness.job.job import DataSection
from harness.rank.data.tokens import settle_hub
from harness.safe_text import encodable


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
