"""Words for what is compared: numbers that agree with their nouns, values without code's brackets, and what
findings say, as `findings.toml` beside this module has it."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.nested import grouped
from harness.record import Record

if TYPE_CHECKING:
    import jinja2

SHOWN_OF_DIGEST = 12
MOST_NAMES = 4
LEAST_SHARE, MOST_SHARE = 1e-8, 1e4
"""Relative differences between the two are written without an exponent."""


class Digest(str):
    """A digest, of which people see the first characters."""

    __slots__ = ()


def counted(count: int, name: str) -> str:
    """'1 node', '2 nodes'."""
    return f"{count} {name}{'' if count == 1 else 's'}"


def ranks(*counts: int) -> str:
    """'1 rank', '2 ranks', '2 and 4 ranks'."""
    numbers = listed([str(count) for count in counts], len(counts))
    return f"{numbers} rank{'' if counts == (1,) else 's'}"


def differs(subject: str, *, plural: bool = False) -> str:
    """'gradient clipping differs', 'optimizer constants differ'."""
    return f"{subject} {'differ' if plural else 'differs'}"


def both(left: Any, right: Any) -> tuple[str, str]:
    """Two different values for people, in full where they would read alike."""
    texts = words(left), words(right)
    return texts if texts[0] != texts[1] else (str(left), str(right))


def numbered(name: str, numbers: Sequence[int]) -> str:
    """'rank 3', 'ranks 0 and 1'."""
    return f"{name if len(numbers) == 1 else name + 's'} {listed([str(number) for number in numbers])}"


def percent(share: float) -> str:
    """A relative difference in percent, with two significant digits: '19 %', '0.0086 %'.

    Without an exponent, unless nobody would count the zeros.
    """
    if not LEAST_SHARE <= abs(share) < MOST_SHARE:
        return f"{share * 100:.2g} %"
    rounded = float(f"{share * 100:.1e}")
    places = 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, places)}f} %"


def words(value: Any) -> str:
    """A value for people: none, on, off, lists without brackets and not longer than a line, short digests."""
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case Digest():
            return value[:SHOWN_OF_DIGEST]
        case str():
            return value
        case dict():
            return words([f"{key} {words(item)}" for key, item in value.items()])
        case Sequence():
            shown = [words(item) for item in value[:MOST_NAMES]]
            rest = len(value) - len(shown)
            mark = "; " if any(", " in item for item in shown) else ", "
            return mark.join([*shown, *([f"{rest} more"] if rest else [])]) or "none"
    return str(value)


def listed(names: Sequence[str], most: int = 6) -> str:
    """'a, b and c'; beyond `most` names the rest as a number."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def a_few(names: Sequence[str], most: int = 3, mark: str = ", ") -> str:
    """'a, b, c' and 'a, b, c and 2 more'; with another mark 'a; b; and 2 more'."""
    if (rest := len(names) - most) <= 0:
        return mark.join(names)
    return f"{mark.join(names[:most])}{' ' if mark == ', ' else mark}and {rest} more"


Backends = tuple[str, ...]
"""Labels of several backends."""


class CellName(NamedTuple):
    """A backend, under the label of its runs, on a number of ranks."""

    label: str
    world_size: int

    @classmethod
    def of(cls, record: Record) -> CellName:
        return cls(record.backend.label, record.world.world_size)

    def __str__(self) -> str:
        """'ddp on 2 ranks'."""
        return f"{self.label} on {ranks(self.world_size)}"

    @property
    def key(self) -> str:
        """'ddp on 2': its key in `compare --json`."""
        return f"{self.label} on {self.world_size}"


def name_cells(subjects: Sequence[CellName | Backends], most: int | None = None) -> str:
    """Several cells in few words: 'zero1 and zero2 on 2 and 4 ranks; fsdp-hybrid on 4 ranks'.

    Names at most `most` backends on the same numbers of ranks, or all of them where it is None. Lists of
    backends come first.
    """
    sizes: dict[str, set[int]] = {}
    others: list[str] = []
    for subject in subjects:
        if isinstance(subject, CellName):
            sizes.setdefault(subject.label, set()).add(subject.world_size)
        elif (names := listed(subject)) not in others:
            others.append(names)
    alike = grouped((tuple(sorted(of_label)), label) for label, of_label in sizes.items())
    cells = [f"{listed(labels, most or len(labels))} on {ranks(*on)}" for on, labels in alike.items()]
    return "; ".join([*([listed(others, most or len(others))] if others else []), *cells])


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
    """Text of a template such as 'shared/settings', 'slow-data/' or 'gradient-differs/idle'."""
    kind, _, case = name.partition("/")
    text = _read()[kind] if kind == SHARED else _read()[kind]["text"]
    return str(text[case] if case else text)


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    def figure(value: float, digits: int = 4) -> str:
        return f"{value:.{digits}g}"

    found = jinja2.Environment(loader=jinja2.FunctionLoader(_text), undefined=jinja2.StrictUndefined)
    found.filters |= {
        "percent": percent,
        "words": words,
        "few": lambda names, *form: a_few(list(names), *form),
        "numbers": lambda numbers: ", ".join(map(str, numbers)),
        "bytes": lambda size: f"{size:,}",
        "figure": figure,
    }
    return found
