"""The text of a record: JSON with one line for each part, so that long runs stay small."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

from harness.record.run import Record


def record_text(record: Record) -> str:
    """The record as JSON: a line for each key, and for each element of its lists of parts.

    Lists of numbers have no line breaks: with one value a line, a run of 64 ranks takes half as much again.
    """
    lines = [f'"{name}":{_value(getattr(record, name))}' for name in Record.model_fields]
    return "{" + ",\n".join(lines) + "}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and not isinstance(value[0], str):
        return "[\n" + ",\n".join(map(_json, value)) + "]"
    return _json(value)


def _json(value: Any) -> str:
    """As pydantic writes a model: floats that are not finite are null."""
    return to_json(value, inf_nan_mode="null").decode()
