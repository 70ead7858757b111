"""Refusals in one line: what was given, what is allowed, the closest name; why a library cannot run a job."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from harness.bounds import LARGEST_NUMBER

LONGEST_INPUT = 200
"""Characters of a value that still say more than its place."""
NO_VALUE = ("none", "nil", "off")
"""What people type for null, in small letters."""
_QUOTED = re.compile("'([^']*)'")
_UNABLE = re.compile(r", unable to [a-z ]+$")
PLAIN = {
    "Input should be": "it must be", "a valid integer": "a whole number", "a valid number": "a number",
    "a valid boolean": "true or false",
}  # fmt: skip
"""Words of pydantic, and those of a person."""
_THOUSANDS = re.compile(r"(\d{1,6})\s*[kK]")
Elsewhere = Mapping[str, Sequence[str]]
"""Dotted settings by the name that a person may have given, in small letters."""


def available(given: str, allowed: Iterable[str], label: str = "Available", meant: Sequence[str] = ()) -> str:
    """The name closest to what was given, or those that are `meant`, then what is allowed."""
    names = list(allowed)
    hint = did_you_mean(meant) if meant else suggestion(given, names)
    return f"{hint} {label}: {', '.join(names) or 'none'}".strip()


def choices(given: str, allowed: Iterable[str]) -> str:
    """List what is allowed, in its own order, and add the name closest to what was given."""
    names = list(allowed)
    listed, hint = ", ".join(names) or "none", suggestion(given, names)
    return f"{listed}. {hint}" if hint else listed


def suggestion(given: str, allowed: Sequence[str], most: int = 1) -> str:
    """Ask for the names closest to what was given; empty if none is close."""
    one_letter = [name for name in allowed if len(name) == len(given) > 2 and _one_letter_off(name, given)]
    close = one_letter if len(one_letter) == 1 else difflib.get_close_matches(given, allowed, n=most)
    close = [name for name in allowed if name.startswith(f"{given}-")][:most] or close
    return did_you_mean(close) if close else ""


def _one_letter_off(name: str, given: str) -> bool:
    """As 'ddp' is of 'dpp'; another digit is another size."""
    differing = [(a, b) for a, b in zip(name, given, strict=True) if a != b]
    return len(differing) == 1 and "".join(differing[0]).isalpha()


def did_you_mean(names: Sequence[str]) -> str:
    """Ask for one of these names."""
    return f"Did you mean {' or '.join(map(repr, names))}?"


def explain_refusal(error: ValidationError, model: type[BaseModel], place: str = "'{}'") -> str:
    """The first problem that pydantic found in a document of `model`, in one line.

    `place` shows the dotted name of a setting, such as "option '{}' of backend 'zero3'".
    """
    return _problem(error.errors()[0], model, place, {})


def explain_refusals(error: ValidationError, model: type[BaseModel], elsewhere: Elsewhere) -> str:
    """Every problem that pydantic found, numbered, in one line. `elsewhere` helps with misplaced names."""
    problems = [_problem(found, model, "'{}'", elsewhere) for found in error.errors()]
    if len(problems) == 1:
        return problems[0]
    numbered = (f"({number}) {problem}" for number, problem in enumerate(problems, start=1))
    return f"{len(problems)} problems: {' '.join(numbered)}"


def _problem(found: Any, model: type[BaseModel], place: str, elsewhere: Elsewhere) -> str:
    location = [str(part) for part in found["loc"]]
    shown = place.format(".".join(location))
    section = f" in {'.'.join(location[:-1])}" if location[:-1] else ""
    if found["type"] == "invalid_key":
        return (
            f"a key{section} is {'null' if found['input'] is None else _shown(found['input'])}; give a name"
        )
    if found["type"] == "extra_forbidden":
        allowed = _fields_at(model, location[:-1])
        names = _meant(location, found["input"], model, elsewhere)
        return f"{shown} is unknown. {available(location[-1], allowed, f'Allowed{section}', names)}"
    message = _UNABLE.sub("", found["msg"]).removeprefix("Value error, ")
    for of_pydantic, plain in PLAIN.items():
        message = message.replace(of_pydantic, plain)
    if not location:
        return message
    given = _shown(found["input"])
    contradiction = found["type"] == "value_error" and isinstance(found["input"], dict)
    if contradiction or found["type"] == "missing" or len(given) > LONGEST_INPUT:
        return f"{shown}: {message}"
    if found["type"] == "model_type":
        hint = did_you_mean(meant) if (meant := elsewhere.get(location[-1], ())) else ""
        section = choices("", _fields_at(model, location))
        return f"{shown} was given {given}; it is a section with {section}{f'. {hint}' if hint else ''}"
    if found["type"] == "literal_error" and isinstance(found["input"], str):
        meant = [name for name in elsewhere.get(_plain(found["input"]), ()) if "=" in name]
        close = suggestion(found["input"], _QUOTED.findall(found["ctx"]["expected"]))
        hint = did_you_mean(meant) if meant else close
        return f"{shown} was given {given}: {message}{f'. {hint}' if hint else ''}"
    if found["type"] == "int_parsing" and (thousands := _THOUSANDS.fullmatch(str(found["input"]).strip())):
        count = int(thousands[1])
        return f"{shown} was given {given}: write {1024 * count}, or {1000 * count} if that is meant"
    section_model = _section_at(model, location[:-1])
    field = section_model.model_fields.get(location[-1]) if section_model else None
    may_be_null = field is not None and NoneType in get_args(field.annotation)
    if str(found["input"]).lower() in NO_VALUE and may_be_null:
        return f"{shown} was given {given}: write null for no value"
    return f"{shown} was given {given}: {message}"


GENERIC = frozenset({"name", "kind", "type", "class", "path", "source"})
"""Last words that name a setting within its section only."""


def _meant(
    location: Sequence[str], given: object, model: type[BaseModel], elsewhere: Elsewhere
) -> Sequence[str]:
    """Settings that are meant by an unknown one: by its value if its section takes it, or by its name."""
    word, section = location[-1], ".".join(location[:-1])
    if isinstance(given, str) and section:
        named = [text for text in elsewhere.get(_plain(given), ()) if text.startswith(f"{section}.")]
        found = _section_at(model, section.split("."))
        taking = [  # settings of the section that take the value, spelled as each takes it
            f"{section}.{name}={value}"
            for name, field in (found.model_fields if found else {}).items()
            for value in _texts(field.annotation)
            if _plain(value) == _plain(given)
        ]
        if named := [text for text in named if "=" in text] or taking:
            return named
    names = elsewhere.get(_plain(word), ())
    if not section or _plain(word) not in GENERIC:
        return names
    return [name for name in names if name.startswith(f"{section}.")]


def _texts(annotation: object) -> Iterator[str]:
    """Strings among the values that a type lists."""
    for part in get_args(annotation):
        if isinstance(part, str):
            yield part
        else:
            yield from _texts(part)


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # numbers of thousands of digits, lists that contain themselves
        return "a value too long to show"


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    section = _section_at(model, location)
    return list(section.model_fields) if section else []


def _section_at(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    for part in (part for part in location if not part.isdecimal()):  # a place in a list
        field = model.model_fields.get(part)
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not found:
            return None
        model = found[0]
    return model


class TypedValues(BaseModel):
    """Settings that a person gives: frozen, unknown keys refused, numbers finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _values_keep_their_type(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic reads true as 1, a slip that would become a job of one step, and 'none' as a name."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise ValueError(f"this number is too large; at most {LARGEST_NUMBER} is read")
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            names = [name for name in get_args(annotation) if isinstance(name, str)]
            allowed = f"; allowed: {', '.join(names)}" if names else ""
            raise ValueError(f"this setting is neither true nor false{allowed}")
        if value in ("none", "None") and annotation == str | None:
            raise ValueError("write null for no value")
        return value


class Unsupported(Exception):
    """The library cannot run this job here; the message says why, for the report."""
