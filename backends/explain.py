"""One-line explanations of values that were refused: what was given, what is allowed, the closest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ValidationError

LONGEST_INPUT = 200
"""Characters of a value that still say more than its place."""


def choices(given: str, allowed: Iterable[str]) -> str:
    """List what is allowed, in its own order, and add the name closest to what was given."""
    names = list(allowed)
    listed, hint = ", ".join(names) or "none", suggestion(given, names)
    return f"{listed}. {hint}" if hint else listed


def suggestion(given: str, allowed: Sequence[str], most: int = 1) -> str:
    """Ask for the names closest to what was given; empty if none is close."""
    close = difflib.get_close_matches(given, allowed, n=most)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""


def explain(error: ValidationError, model: type[BaseModel], place: str = "'{}'") -> str:
    """The first problem that pydantic found in a document of `model`, in one line.

    `place` shows the dotted name of a setting, such as "option '{}' of backend 'zero3'".
    """
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    shown = place.format(".".join(location))
    if first["type"] == "extra_forbidden":
        section = f" in {'.'.join(location[:-1])}" if location[:-1] else ""
        return (
            f"{shown} is unknown. Allowed{section}: {choices(location[-1], _fields_at(model, location[:-1]))}"
        )
    message = first["msg"].removeprefix("Value error, ")
    given = _shown(first["input"])
    contradiction = first["type"] == "value_error" and isinstance(first["input"], dict)
    if not location:
        return message
    if contradiction or first["type"] == "missing" or len(given) > LONGEST_INPUT:
        return f"{shown}: {message}"
    if first["type"] == "model_type":
        return f"{shown} was given {given}; it is a section with {choices('', _fields_at(model, location))}"
    return f"{shown} was given {given}: {message}"


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # numbers of thousands of digits, lists that contain themselves
        return "a value too long to show"


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    for part in location:
        field = model.model_fields.get(part)
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return []
        model = field.annotation
    return list(model.model_fields)
