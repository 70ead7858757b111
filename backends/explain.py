"""One-line explanations of values that were refused: what was given, what is allowed, the closest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

LONGEST_INPUT = 200
"""Characters of a value that still say more than its place."""
NO_VALUE = ("none", "nil", "off")
"""What people type for null, in small letters."""
_QUOTED = re.compile("'([^']*)'")
Elsewhere = Mapping[str, Sequence[str]]
"""Dotted settings by the name that a person may have given, in small letters."""


def available(given: str, allowed: Iterable[str], label: str = "Available") -> str:
    """The name closest to what was given, then what is allowed: for lists whose end nobody reads."""
    names = list(allowed)
    hint = suggestion(given, names)
    return f"{hint} {label}: {', '.join(names)}".strip()


def choices(given: str, allowed: Iterable[str]) -> str:
    """List what is allowed, in its own order, and add the name closest to what was given."""
    names = list(allowed)
    listed, hint = ", ".join(names) or "none", suggestion(given, names)
    return f"{listed}. {hint}" if hint else listed


def suggestion(given: str, allowed: Sequence[str], most: int = 1) -> str:
    """Ask for the names closest to what was given; empty if none is close."""
    close = difflib.get_close_matches(given, allowed, n=most)
    return did_you_mean(close) if close else ""


def did_you_mean(names: Sequence[str]) -> str:
    """Ask for one of these names."""
    return f"Did you mean {' or '.join(map(repr, names))}?"


def explain(error: ValidationError, model: type[BaseModel], place: str = "'{}'") -> str:
    """The first problem that pydantic found in a document of `model`, in one line.

    `place` shows the dotted name of a setting, such as "option '{}' of backend 'zero3'".
    """
    return _problem(error.errors()[0], model, place, {})


def explain_all(error: ValidationError, model: type[BaseModel], elsewhere: Elsewhere) -> str:
    """Every problem that pydantic found, numbered, in one line. `elsewhere` helps with misplaced names."""
    problems = [_problem(found, model, "'{}'", elsewhere) for found in error.errors()]
    if len(problems) == 1:
        return problems[0]
    numbered = (f"({number}) {problem}" for number, problem in enumerate(problems, start=1))
    return f"{len(problems)} problems: {' '.join(numbered)}"


def _problem(found: Any, model: type[BaseModel], place: str, elsewhere: Elsewhere) -> str:
    location = [str(part) for part in found["loc"]]
    shown = place.format(".".join(location))
    if found["type"] == "extra_forbidden":
        section = f" in {'.'.join(location[:-1])}" if location[:-1] else ""
        allowed = _fields_at(model, location[:-1])
        names = elsewhere.get(location[-1].lower().replace("-", "_"), ())
        listed = f"{', '.join(allowed)}. {did_you_mean(names)}" if names else choices(location[-1], allowed)
        return f"{shown} is unknown. Allowed{section}: {listed}"
    message = found["msg"].removeprefix("Value error, ")
    if not location:
        return message
    given = _shown(found["input"])
    contradiction = found["type"] == "value_error" and isinstance(found["input"], dict)
    if contradiction or found["type"] == "missing" or len(given) > LONGEST_INPUT:
        return f"{shown}: {message}"
    if found["type"] == "model_type":
        return f"{shown} was given {given}; it is a section with {choices('', _fields_at(model, location))}"
    if found["type"] == "literal_error" and isinstance(found["input"], str):
        hint = suggestion(found["input"], _QUOTED.findall(found["ctx"]["expected"]))
        return f"{shown} was given {given}: {message}{f'. {hint}' if hint else ''}"
    if str(found["input"]).lower() in NO_VALUE and _may_be_null(model, location):
        return f"{shown} was given {given}: write null for no value"
    return f"{shown} was given {given}: {message}"


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # numbers of thousands of digits, lists that contain themselves
        return "a value too long to show"


def _may_be_null(model: type[BaseModel], location: Sequence[str]) -> bool:
    section = _section_at(model, location[:-1])
    field = section.model_fields.get(location[-1]) if section else None
    return field is not None and NoneType in get_args(field.annotation)


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    section = _section_at(model, location)
    return list(section.model_fields) if section else []


def _section_at(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    for part in location:
        field = model.model_fields.get(part)
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return None
        model = field.annotation
    return model
