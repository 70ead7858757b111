"""The reference of `record.json`, from the models that read and write it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import getdoc, getsource
from itertools import pairwise
from typing import Any, get_type_hints

from pydantic import BaseModel

from docs.hooks.tables import code, table
from harness.job.job import SettingsSection
from harness.job.reference import in_words, models_within, unit, yaml_value
from harness.record import Record
from harness.record.run import SCHEMA_VERSION

TITLE = "Record schema"
HEAD = f"""\
# Record schema

Generated from `harness/record`. Every run leaves one `record.json` of schema version {SCHEMA_VERSION};
records of version 1 are converted when they are read, and unknown keys are refused. Sizes are bytes,
durations seconds. `null` means "not known" or "does not apply". The job and the settings of the measurement
have the keys of the page [Settings](settings.md).
"""
REQUIRED = "required"


def models() -> list[type]:
    """The record and every part within it, in the order in which they are met; settings are left out."""
    found: list[type] = [Record]
    for model in found:
        for annotation in get_type_hints(model).values():
            parts = [part for part in models_within(annotation) if not _is_settings(part)]
            found += [part for part in parts if part not in found]
    return found


def record_fields(model: type) -> Iterator[tuple[str, Any, str]]:
    """Name, annotation and default of each field of a part of the record."""
    hints = get_type_hints(model)
    if is_dataclass(model):
        for field in fields(model):
            factory = field.default_factory
            default = field.default if factory is MISSING else factory()
            yield field.name, hints[field.name], REQUIRED if default is MISSING else yaml_value(default)
        return
    assert issubclass(model, BaseModel)
    for name, info in model.model_fields.items():
        default = REQUIRED if info.is_required() else yaml_value(info.get_default(call_default_factory=True))
        yield name, hints[name], default


def records_page() -> str:
    """The page in Markdown: one table for each part of a record."""
    parts = [HEAD]
    for model in models():
        rows = [
            [
                code(name),
                in_words(annotation, _link),
                unit(name),
                default if default == REQUIRED else code(default),
                meaning(model, name, annotation),
            ]
            for name, annotation, default in record_fields(model)
        ]
        parts += [
            f"## {model.__name__}",
            getdoc(model) or "",
            table(["field", "type", "unit", "default", "meaning"], rows),
        ]
    return "\n\n".join(parts) + "\n"


def meaning(model: type, field: str, annotation: Any) -> str:
    """What the docstring below a field says, else that of the part which it holds; None is null in a file."""
    held = [getdoc(part) or "" for part in models_within(annotation)]
    owner = next((kind for kind in model.__mro__ if field in vars(kind).get("__annotations__", {})), model)
    text = _docstrings(owner).get(field) or "".join(held[:1]).partition("\n\n")[0]
    return " ".join(text.split()).replace("None", "null")


@cache
def _docstrings(model: type) -> dict[str, str]:
    """Docstrings of a class's attributes, which Python does not keep."""
    (definition,) = ast.parse(getsource(model)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: str(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _is_settings(model: type) -> bool:
    return issubclass(model, SettingsSection)


def _link(model: type) -> str:
    return "settings" if _is_settings(model) else f"[{model.__name__}](#{model.__name__.lower()})"
