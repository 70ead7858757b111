"""How numbers, texts and tables are written for people, on a terminal within its width."""

from __future__ import annotations

import html
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import TextWrapper, wrap

NOT_AVAILABLE = "n/a"
# Control, format (which can reverse a line), surrogate and private characters.
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_KEPT = ("\t", "\u200c", "\u200d")
"""Tabs, and the joiners that some scripts are spelled with."""


def _in(unit: float) -> Callable[[float | None], str]:
    """Values in a unit, three significant places below 100."""
    return lambda value: number(None if value is None else value / unit)


megabytes = _in(1e6)
gigabytes = _in(1e9)
teraflops = _in(1e12)


def milliseconds(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else number(value * 1e3)


def number(value: float | None) -> str:
    """Three significant places, no exponent, thousands separated."""
    if value is None:
        return NOT_AVAILABLE
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def scientific(value: float | None) -> str:
    """Two significant places with exponent; 0 as 0."""
    if value is None:
        return NOT_AVAILABLE
    return "0" if value == 0 else f"{value:.1e}"


def short(value: float | None) -> str:
    """As many digits as a count needs: 1, 2.5."""
    return NOT_AVAILABLE if value is None else f"{value:g}"


def one_line(text: str, *, keep_spaces: bool = False) -> str:
    """Text without line breaks; control and direction characters become a replacement mark."""
    flat = text if keep_spaces else " ".join(text.split())
    if flat.isascii() and flat.isprintable():
        return flat
    return "".join(c if c in _KEPT or unicodedata.category(c) not in _UNPRINTABLE else "\ufffd" for c in flat)


def shortened(text: str, most: int) -> str:
    """Text of at most so many characters on one line, beginning and end kept."""
    text = one_line(text)
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def markdown_text(text: str) -> str:
    """Free text made harmless in markdown, also in a table cell.

    Python-Markdown escapes neither < nor & with a backslash, so these are entities; a brace would begin
    attributes of an element (its `attr_list`) or an expression of a site's templates. A tilde by itself
    strikes nothing through.
    """
    flat = html.escape(one_line(text).replace("\\", "\\\\"), quote=False)
    for character in "`*_[]|#${" + "~" * (flat.count("~") > 1):
        flat = flat.replace(character, f"\\{character}")
    return flat


def percent(value: float | None) -> str:
    """A ratio as whole percent, below one to its first digit: 98 %, 0.4 %."""
    if value is None:
        return NOT_AVAILABLE
    if 0 < value < 1e-6:
        return "< 0.0001 %"
    return f"{value * 100:.1g} %" if 0 < value < 0.01 else f"{value:.0%}".replace("%", " %")


def times(value: float | None) -> str:
    """A ratio: 0.38, 1.50, 52.9."""
    return f"{value:.2f}" if value is not None and 0.01 <= value < 10 else number(value)


def signed_percent(value: float | None) -> str:
    """A relative change: +5.0 %, -0.3 %."""
    return NOT_AVAILABLE if value is None else f"{value:+.1%}".replace("%", " %")


def exact(value: float | None) -> str:
    """Bytes with thousands separated; a fraction, which rings of some sizes give, to one place."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def signed(value: float | None) -> str:
    """Bytes with thousands separated, and their sign."""
    if value is None:
        return NOT_AVAILABLE
    return ("+" if value > 0 else "") + exact(value)


def utilisation(value: float | None) -> str:
    """A ratio as percent with one decimal: 41.7 %."""
    return NOT_AVAILABLE if value is None else f"{value * 100:.1f} %"


def dash(value: object) -> str:
    """A dash, which is not 'not measured'."""
    return "-" if value is None else str(value)


def beginning(digest: str) -> str:
    return digest[:16]


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
    pieces = [[max(BREAKS.split(text), key=len) for text in row] for row in (headers, *rows)]
    words = _widths(pieces[1:], pieces[0])
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
    cells = [_Cell(size).wrap(text) or [""] for text, size in zip(row, most, strict=True)]
    return list(zip_longest(*cells, fillvalue=""))
