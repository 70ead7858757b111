"""Reads a configuration: YAML file, then --set values, checked with one-line errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from harness.backends.values import parse_value
from harness.errors import HarnessError, choices
from harness.spec import Experiment


def load_experiment(path: Path | None, assignments: Sequence[str] = ()) -> Experiment:
    """Read the YAML file, apply 'a.b=c' assignments in order, validate.

    Values after '=' are YAML, so `training.steps=60` is a number and `model.config={...}` a mapping.
    Relative paths in a file are kept as they are: they count from the working directory.
    Raises HarnessError naming the key, what was given and what is allowed.
    """
    document = _read(path) if path else {}
    # A section whose lines are all commented out is empty, not null.
    document = {key: {} if value is None else value for key, value in document.items()}
    for assignment in assignments:
        _assign(document, assignment)
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise HarnessError(_explain(error)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HarnessError(f"configuration {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HarnessError(f"configuration {path} is not UTF-8 text") from error
    document = _parse(text, f"configuration {path}")
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise HarnessError(
            f"configuration {path} holds a {type(document).__name__}; it must be a mapping of "
            f"{choices('', Experiment.model_fields)}"
        )
    return document


def _assign(document: dict[str, Any], assignment: str) -> None:
    key, _, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not text.strip() or not all(parts):
        raise HarnessError(f"--set was given '{assignment}'; write SECTION.KEY=VALUE, with null for no value")
    target = document
    for part in parts[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise HarnessError(f"--set {key}: '{part}' is a value ({inner!r}), not a section")
        target = inner
    target[parts[-1]] = _parse(text, f"--set {key}")


def _parse(text: str, where: str) -> Any:
    try:
        return parse_value(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise HarnessError(f"{where} is not valid YAML{line}: {problem}") from error


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    place = ".".join(location) or "the configuration"
    if first["type"] == "extra_forbidden":
        allowed = _fields_at(location[:-1])
        section = ".".join(location[:-1]) or "a configuration"
        return f"'{place}' is unknown. Allowed in {section}: {choices(location[-1], allowed)}"
    given = f"'{place}' was given {first['input']!r}"
    if first["type"] == "model_type":
        return f"{given}; it is a section with {choices('', _fields_at(location))}"
    message = first["msg"].removeprefix("Value error, ")
    contradiction = first["type"] == "value_error" and isinstance(first["input"], dict)
    return f"'{place}': {message}" if contradiction else f"{given}: {message}"


def _fields_at(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Experiment
    for part in location:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
