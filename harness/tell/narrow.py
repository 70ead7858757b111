"""Tables and sentences on a terminal that fit its width."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from textwrap import TextWrapper, wrap

WIDTH = 100
"""Characters of a line without --wide."""
LEAST = 12
"""Characters of a column that is shortened or broken."""
GAP = "  "
CUT = "…"
BREAKS = re.compile(r"(\s+|(?<=[:,])(?=[a-z]))")
"""Where a cell may break: between words, and between a backend and its options."""
WHOLE = re.compile(r"\S {2,}\S|^\s*\||^\s+harness ")
"""In a line of a table, or a command to copy."""


def narrow(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    *,
    shrinks: Sequence[str] = (),
    keeps_end: Sequence[str] = (),
    alignments: Mapping[str, str] | None = None,
    wide: bool = False,
) -> str:
    """A table of texts; unless `wide`, columns of `shrinks` are cut where it is too wide, in their order.

    Those of `keeps_end` lose their beginning, the others their end. `alignments`: 'left' or 'right' by
    heading; left where there is none.
    """
    table = [[*row] for row in rows]
    for name in () if wide else shrinks:
        place = [*headers].index(name)
        excess = sum(_widths(table, headers)) + len(GAP) * (len(headers) - 1) - WIDTH
        longest = max((len(row[place]) for row in table), default=0)
        if excess > 0:
            most = max(LEAST, len(name), longest - excess)
            for row in table:
                row[place] = shortened(row[place], most, keeps_end=name in keeps_end)
    return _laid_out([headers], table, _right(headers, alignments))


def fitted(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    *,
    alignments: Mapping[str, str] | None = None,
    width: int = WIDTH,
) -> str:
    """A table of texts whose cells and headings break at words where it is too wide, the widest column first.

    If that is not enough, columns stand closer, and long words break. `alignments` as of `narrow`.
    """
    words = _longest_words(rows, headers)
    gap = GAP if sum(words) + len(GAP) * (len(words) - 1) <= width else " "
    most = _broken(_widths(rows, headers), words, width - len(gap) * (len(words) - 1))
    body = [line for row in rows for line in _lines_of(row, most)]
    return _laid_out(_lines_of(headers, most), body, _right(headers, alignments), gap)


def folded(text: str, width: int = WIDTH) -> str:
    """Sentences broken at words, below the beginning of their line; lines of tables and commands stay."""
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
    wordsep_simple_re = BREAKS

    def __init__(self, width: int) -> None:
        super().__init__(width, break_on_hyphens=False)


def shortened(text: str, most: int, *, keeps_end: bool = False) -> str:
    """A text of at most so many characters; what was cut shows as an ellipsis."""
    if len(text) <= most:
        return text
    return CUT + text[1 - most :] if keeps_end else text[: most - 1] + CUT


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
