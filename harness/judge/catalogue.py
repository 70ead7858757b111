"""What findings say: their sentences and explanations, as `findings.toml` beside this module has them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from harness.judge.wording import a_few, percent, words

Entry = dict[str, Any]


SHARED = "shared"
"""Parts of several sentences, which are no finding."""


@cache
def entries() -> dict[str, Entry]:
    """Every kind of finding by its id, in the order of reports."""
    return {kind: entry for kind, entry in _read().items() if kind != SHARED}


def sentence(kind: str, case: str = "", /, **figures: Any) -> str:
    """What a finding of this kind says of these figures; `case`: which of the kind's sentences."""
    return _environment().get_template(f"{kind}/{case}").render(figures)


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("findings.toml").read_text(encoding="utf-8"))


def _text(name: str) -> str:
    """Of a template such as 'shared/settings', 'slow-data/' or 'gradient-differs/idle'."""
    kind, _, case = name.partition("/")
    text = _read()[kind] if kind == SHARED else _read()[kind]["text"]
    return str(text[case] if case else text)


@cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(loader=jinja2.FunctionLoader(_text), undefined=jinja2.StrictUndefined)
    found.filters |= {
        "percent": percent,
        "words": words,
        "few": _few,
        "numbers": lambda numbers: ", ".join(map(str, numbers)),
        "bytes": lambda size: f"{size:,}",
        "figure": _figure,
    }
    return found


def _few(names: Iterable[str], most: int = 3, mark: str = ", ") -> str:
    return a_few(list(names), most, mark)


def _figure(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}g}"
