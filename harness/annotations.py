"""Annotations of settings and record fields in words."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

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
    """Text as inline code."""
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
