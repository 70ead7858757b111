"""How the short report writes figures of several cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.backends.strategy import ROUTE_PREFIXES
from harness.judge.wording import listed
from harness.tell.document import Line

Level = tuple[list[str], float]
"""Labels whose figures are written alike, and the first of these."""
MOST_NAMES = 4


def ratio(value: float, base: float) -> str:
    """'1.5 x', '0.5 x'; '1 x' where both are shown alike."""
    return f"{value / base:.3g} x"


def levels(figures: Mapping[str, float], show: Callable[[float], str]) -> list[Level]:
    """Cells whose figures are written alike together, with the first figure; least first."""
    found: dict[str, Level] = {}
    for label, value in sorted(figures.items(), key=lambda item: item[1]):
        found.setdefault(show(value), ([], value))[0].append(label)
    return list(found.values())


def ends(found: Sequence[Level], most: int) -> list[Level]:
    """At most so many levels; the last is kept, since it tells how far they reach."""
    return list(found) if len(found) <= most else [*found[: most - 1], found[-1]]


def unwrapped(label: str) -> str:
    """The label of the backend that another runs through a library of Hugging Face."""
    prefix = next((known for known in ROUTE_PREFIXES if label.startswith(known)), "")
    return label.removeprefix(prefix)


def names(labels: list[str], most: int = MOST_NAMES) -> str:
    """'a, b and c'; beyond `most` the rest as a number.

    A backend through Accelerate or Trainer is not named next to the same one without.
    """
    bare = {label for label in labels if unwrapped(label) == label}
    return listed([label for label in labels if label in bare or unwrapped(label) not in bare], most)


def sentence(*clauses: str) -> str:
    """Clauses as one sentence."""
    text = "; ".join(clause for clause in clauses if clause)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def fitting(lines: Sequence[Line], *, most_lines: int, most_words: int, link_words: int) -> list[Line]:
    """The first lines that fit; the first always does. `link_words`: of each line's reference."""
    kept: list[Line] = []
    words = 0
    for line in lines[:most_lines]:
        words += len(line.name.split()) + len(line.text.split()) + link_words
        if kept and words > most_words:
            break
        kept.append(line)
    return kept


def shortened(text: str, most_words: int) -> str:
    """Text of at most so many words, after a clause where one ends in its second half; the rest is marked."""
    words = text.split()
    if len(words) <= most_words:
        return text
    kept = words[:most_words]
    clauses = [place for place, word in enumerate(kept, 1) if word[-1] in ",;:." and 2 * place >= most_words]
    shown = " ".join(kept[: clauses[-1] if clauses else most_words]).rstrip(",;:.")
    return f"{shown} ...{')' if shown.count('(') > shown.count(')') else ''}"
