"""Reads files of other tools, which nobody has checked: plain, small, data only."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from harness.backends.yaml_values import require_bounded
from harness.errors import HarnessError
from harness.files import read_settings
from harness.job.config import parse_yaml

BYTE_ORDER_MARK = "\ufeff"
"""What some editors write first."""
_STRING = r'("(?:[^"\\]|\\.)*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class GivenFile:
    """A file and its content."""

    path: Path
    document: dict[str, Any]
    sha256: str


def read_json(path: Path, what: str, *, has_comments: bool = False) -> GivenFile:
    """A JSON object. Raises HarnessError: unreadable, too large, a key twice, NaN, too deep.

    has_comments: comments and a comma after the last value are left out, as DeepSpeed's own reader does.
    """
    text = read_settings(path, what).removeprefix(BYTE_ORDER_MARK)
    try:
        document = _parsed(text, has_comments)
        require_bounded(document)
    except json.JSONDecodeError as error:
        raise HarnessError(
            f"{what} {path} is not valid JSON, line {error.lineno}: {error.msg}"
            + ("" if has_comments else "; comments are not JSON")
        ) from error
    except RecursionError as error:
        raise HarnessError(f"{what} {path} is nested too deeply") from error
    except ValueError as error:
        raise HarnessError(f"{what} {path} {error}") from error
    return _mapping(path, text, document, what)


def read_yaml(path: Path, what: str) -> GivenFile:
    """A YAML mapping. Raises HarnessError."""
    text = read_settings(path, what).removeprefix(BYTE_ORDER_MARK)
    return _mapping(path, text, parse_yaml(text, f"{what} {path}"), what)


def read_toml(path: Path, what: str) -> GivenFile:
    """A TOML file, as torchtitan has one. Raises HarnessError."""
    text = read_settings(path, what)
    try:
        return _mapping(path, text, tomllib.loads(text), what)
    except tomllib.TOMLDecodeError as error:
        raise HarnessError(f"{what} {path} is not valid TOML: {error}") from error


def _parsed(text: str, has_comments: bool) -> Any:
    """Raises ValueError."""
    read = partial(json.loads, object_pairs_hook=_once, parse_constant=_no_constant)
    try:
        return read(text)
    except json.JSONDecodeError:
        if not has_comments:
            raise
    bare = _COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)
    return read(_LAST_COMMA.sub(lambda found: found[1] or "", bare))


def _mapping(path: Path, text: str, document: Any, what: str) -> GivenFile:
    if not isinstance(document, dict):
        raise HarnessError(
            f"{what} {path} holds a {type(document).__name__}; it must be a mapping of settings"
        )
    return GivenFile(path=path, document=document, sha256=hashlib.sha256(text.encode()).hexdigest())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"gives '{key}' twice")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}, which is not a number")
