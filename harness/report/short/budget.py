"""Lines that fit into the short report: few, and few words together."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.document import Line


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
    """Text of at most so many words; what is left out is marked."""
    words = text.split()
    return text if len(words) <= most_words else " ".join(words[:most_words]).rstrip(",;:.") + " ..."
