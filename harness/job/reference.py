"""Every setting in words, from the models that read configuration files: as help and as a file to fill in."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from inspect import cleandoc
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from harness.job.experiment import INHERITS, Experiment

PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "any value"}
SUFFIXES = {
    "_bytes_per_second": "bytes/s",
    "_flops_per_second": "FLOP/s",
    "megabits_per_second": "Mbit/s",
    "_bytes": "bytes",
    "_seconds": "s",
    "_joules": "J",
}
"""Endings of names that say a unit, longest first."""
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def code(text: str) -> str:
    return f"`{text}`"


def plain(text: str) -> str:
    """Words about a type for a terminal: values that are allowed, with bars between them."""
    return text.replace("` `", " | ").replace("`", "")


def bounds(metadata: Iterable[Any]) -> str:
    """The range of a number in brackets; empty if it has none."""
    found = [
        f"{sign} {limit:g}" if abs(limit) < 2**31 else f"{sign} 2^{limit.bit_length() - 1}"
        for constraint in metadata
        for name, sign in BOUNDS.items()
        if (limit := getattr(constraint, name, None)) is not None
    ]
    return f"({', '.join(found)})" if found else ""


def unit(name: str) -> str:
    """The unit that a field's name says; empty if it says none."""
    if name == "seconds":
        return "s"
    return next((words for suffix, words in SUFFIXES.items() if name.endswith(suffix)), "")


def in_words(annotation: Any, shown: Callable[[type], str] = lambda model: model.__name__) -> str:
    """A type as a reader says it; `shown` writes the name of a model or dataclass."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return " ".join(filter(None, (in_words(inner[0], shown), bounds(inner[1:]))))
    if origin is Literal:
        return " ".join(code(str(value)) for value in inner)
    if origin in (Union, types.UnionType):
        named = [in_words(part, shown) for part in inner if part is not type(None)]
        return " or ".join([*named, "null"] if type(None) in inner else named)
    if origin is list or (origin is tuple and inner[-1:] == (...,)):
        return f"list of {in_words(inner[0], shown)}"
    if origin is tuple:
        return f"list of {len(inner)}: {', '.join(in_words(part, shown) for part in inner)}"
    if origin is dict:
        return f"{in_words(inner[0], shown)} → {in_words(inner[1], shown)}"
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        return shown(annotation)
    return PLAIN.get(annotation) or str(getattr(annotation, "__name__", annotation))


def models_within(annotation: Any) -> list[type]:
    """Models and dataclasses that an annotation names, in order."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return [annotation] if issubclass(annotation, BaseModel) or is_dataclass(annotation) else []
    return [model for part in get_args(annotation) for model in models_within(part)]


WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class DocumentedSetting:
    """One setting."""

    section: str
    key: str
    """Empty: the section is one value."""
    kind: str
    """Its type and range: 'integer (> 0) or null'."""
    default: str
    """As YAML writes it."""
    unit: str
    meaning: str

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}" if self.key else self.section


def sections() -> dict[str, str]:
    """The sections in their order, with what each is."""
    return {
        name: cleandoc(model.__doc__ or "") if (model := section_model(field)) else field.description or ""
        for name, field in Experiment.model_fields.items()
    }


def settings(section: str | None = None) -> Iterator[DocumentedSetting]:
    """Every setting of a section, or of all."""
    for name, field in Experiment.model_fields.items():
        if section not in (None, name):
            continue
        model = section_model(field)
        for key, found in model.model_fields.items() if model else [("", field)]:
            yield DocumentedSetting(
                section=name,
                key=key,
                kind=plain(" ".join(filter(None, (in_words(found.annotation), bounds(found.metadata))))),
                default=yaml_value(found.get_default(call_default_factory=True)),
                unit=unit(key),
                meaning=found.description or "",
            )


def commented_file(schema: str | None = None) -> str:
    """A configuration file with every setting at its default, commented out.

    `schema`: where an editor finds the JSON schema of the file.
    """
    lines = [f"# yaml-language-server: $schema={schema}"] if schema else []
    lines += ["# Every setting with its default. Remove the # in front of those to change."]
    for section, what in sections().items():
        found = list(settings(section))
        if not found[0].key:
            lines += ["", *_commented(found[0], section, "")]
            continue
        lines += ["", f"{section}:  # {what}"]
        for setting in found:
            lines += _commented(setting, setting.key, "  ")
    return "\n".join(lines) + "\n"


def _commented(setting: DocumentedSetting, key: str, indent: str) -> list[str]:
    meaning = textwrap.wrap(
        f"{setting.meaning} [{setting.kind}]", WIDTH, initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}#   ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [*meaning, f"{indent}#{key}: {setting.default}"]


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors."""
    schema = Experiment.model_json_schema()
    name = {"type": "string"}
    schema["properties"][INHERITS] = {
        "description": "file, or files, whose values hold where this one has none; '@default' is shipped",
        "anyOf": [name, {"type": "array", "items": name}],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def yaml_value(default: Any) -> str:
    """A default as YAML writes it."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, list):
        quoted = (f'"{item}"' if ":" in str(item) else str(item) for item in default)
        return f"[{', '.join(quoted)}]"
    return str(default)


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """The settings of a section; None: the section is one value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
