"""Lines that fit into the short report: few, and few words together."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.document import Line

LINK_WORDS = 5
"""Of a reference to the details, at most."""


def fitting(lines: Sequence[Line], *, most_lines: int, most_words: int) -> list[Line]:
    """The first lines that fit; the first always does."""
    kept: list[Line] = []
    words = 0
    for line in lines[:most_lines]:
        words += word_count(line)
        if kept and words > most_words:
            break
        kept.append(line)
    return kept


def word_count(line: Line) -> int:
    """Words of a line with its reference."""
    return len(line.name.split()) + len(line.text.split()) + (LINK_WORDS if line.details else 0)


def shortened(text: str, most_words: int) -> str:
    """Text of at most so many words; what is left out is marked."""
    words = text.split()
    return text if len(words) <= most_words else " ".join(words[:most_words]).rstrip(",;:.") + " ..."
