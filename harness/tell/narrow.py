"""Tables and sentences on a terminal that fit its width."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import TextWrapper, wrap

WIDTH = 100
"""Characters of a line without --wide, and no more where a terminal has them."""
LEAST = 12
"""Characters of a column whose words break."""
GAP = "  "
BREAKS = re.compile(r"((?<!\d to)\s+(?!to [<>]?\d)|(?<=[:,])(?=[a-z]))")
"""Where a cell may break: between words, except in '0.54 to 1.15', and between a backend and its options."""
WHOLE = re.compile(r"\S {2,}\S|^\s*\||^\s+harness ")
"""In a line of a table, or a command to copy."""


def fitted(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    *,
    alignments: Mapping[str, str] | None = None,
    wide: bool = False,
) -> str:
    """A table of texts whose cells and headings break at words where it is too wide, the widest column first.

    If that is not enough, columns stand closer, and long words break; nothing is cut. `alignments`: 'left' or
    'right' by heading; left where there is none. `wide`: every row is one line.
    """
    if wide:
        return _laid_out([headers], rows, _right(headers, alignments))
    width = line_width()
    words = _longest_words(rows, headers)
    gap = GAP if sum(words) + len(GAP) * (len(words) - 1) <= width else " "
    most = _broken(_widths(rows, headers), words, width - len(gap) * (len(words) - 1))
    body = [line for row in rows for line in _lines_of(row, most)]
    return _laid_out(_lines_of(headers, most), body, _right(headers, alignments), gap)


def line_width() -> int:
    """Characters of a line: those of the terminal on standard output, 60 at least; 100 elsewhere."""
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDTH
    return max(60, min(WIDTH, get_terminal_size((WIDTH, 0)).columns))


def folded(text: str) -> str:
    """Sentences broken at words, below the beginning of their line; lines of tables and commands stay."""
    width = line_width()
    return "\n".join(
        line if len(line) <= width or WHOLE.search(line) else _folded(line, width)
        for line in text.split("\n")
    )


def _folded(line: str, width: int) -> str:
    start = line[: len(line) - len(line.lstrip())]
    below = start + ("  " if line.lstrip().startswith("- ") else "")
    pieces = wrap(
        line.strip(), width, initial_indent=start, subsequent_indent=below, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(pieces)


class _Cell(TextWrapper):
    """Breaks where it may; a longer word at its hyphens, or anywhere."""

    wordsep_re = BREAKS


def _laid_out(
    head: Sequence[Sequence[str]], body: Sequence[Sequence[str]], right: Sequence[bool], gap: str = GAP
) -> str:
    widths = _widths([*head[1:], *body], head[0])
    lines = [*head, ["-" * width for width in widths], *body]
    return "\n".join(
        gap.join(
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _right(headers: Sequence[str], alignments: Mapping[str, str] | None) -> list[bool]:
    return [(alignments or {}).get(name) == "right" for name in headers]


def _widths(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> list[int]:
    return [max(len(text) for text in column) for column in zip(headers, *rows, strict=True)]


def _longest_words(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> list[int]:
    words = [[max(BREAKS.split(text), key=len) for text in row] for row in (headers, *rows)]
    return _widths(words[1:], words[0])


def _broken(widths: Sequence[int], words: Sequence[int], room: int) -> list[int]:
    """Widths of columns that fit together: the widest gives way, down to its words and then below them."""
    most = [*widths]
    for least in ([*words], [LEAST] * len(most)):
        while sum(most) > room:
            giving = [place for place, size in enumerate(most) if size > least[place]]
            if not giving:
                break
            most[max(giving, key=lambda place: most[place])] -= 1
    return most


def _lines_of(row: Sequence[str], most: Sequence[int]) -> list[tuple[str, ...]]:
    """The lines of one row of cells."""
    cells = [_Cell(size).wrap(text) or [""] for text, size in zip(row, most, strict=True)]
    return list(zip_longest(*cells, fillvalue=""))
