"""Words for what is compared: verbs that agree with their subject, values without code's brackets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

LONGEST_DIGEST = 12
MOST_NAMES = 4
LEAST_SHARE, MOST_SHARE = 1e-8, 1e4
"""Relative differences between the two are told without an exponent."""
_DIGEST = re.compile(r"[0-9a-f]{32,}")
_CONSTANT = re.compile(r"([a-z_]+) (\[[^]]*\]|[^ ,]+)(?:, |$)")
_HEAD = re.compile(r" (?:of|without|with|that|in|over) ")


def counted(count: int, name: str) -> str:
    """'1 node', '2 nodes'."""
    return f"{count} {name}{'' if count == 1 else 's'}"


def ranks(*counts: int) -> str:
    """'1 rank', '2 ranks', '2 and 4 ranks'."""
    numbers = listed([str(count) for count in counts], len(counts))
    return f"{numbers} rank{'' if counts == (1,) else 's'}"


def verb(subject: str, singular: str, plural: str) -> str:
    """The form that agrees with a field's name: 'dtype of masters' is one, 'initial weights' are several."""
    head = _HEAD.split(subject, maxsplit=1)[0]
    is_path = "." in head or "_" in head
    several = head.endswith("s") and not head.endswith("ss") and not is_path
    return plural if several else singular


def differs(subject: str) -> str:
    """'gradient clipping differs', 'optimizer constants differ'."""
    return f"{subject} {verb(subject, 'differs', 'differ')}"


def both(left: Any, right: Any) -> tuple[str, str]:
    """Two different values for people, in full where they would read alike.

    Of constants, 'eps 1e-08, weight_decay 0.1' in a list for each group, only those that differ.
    """
    texts = words(left), words(right)
    if isinstance(left, list) and isinstance(right, list):
        sides = _constants(left), _constants(right)
        apart = [key for key in sides[0] if sides[1].get(key, sides[0][key]) != sides[0][key]]
        if apart:
            given, other = (", ".join(f"{key} {side[key]}" for key in apart) for side in sides)
            return given, other
    return texts if texts[0] != texts[1] else (str(left), str(right))


def _constants(groups: Sequence[Any]) -> dict[str, str]:
    """Of each constant all its values; empty for a list of something else."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for key, value in _CONSTANT.findall(str(group)):
            if value not in found.setdefault(key, []):
                found[key].append(value)
    return {key: " and ".join(values) for key, values in found.items()}


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
        case str():
            return value[:LONGEST_DIGEST] if _DIGEST.fullmatch(value) else value
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
