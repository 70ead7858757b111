"""Tables on a terminal that fit its width."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 100
"""Characters of a line without --wide."""
LEAST = 12
"""Characters of a column that is shortened."""
GAP = 2
PADDING = 2
"""What tabulate keeps free next to a heading."""
CUT = "…"


def narrow(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    *,
    shrinks: Sequence[str] = (),
    keeps_end: Sequence[str] = (),
    wide: bool = False,
) -> str:
    """A table of texts; unless `wide`, columns of `shrinks` are cut where it is too wide, in their order.

    Those of `keeps_end` lose their beginning, the others their end.
    """
    from tabulate import tabulate

    table = [[*row] for row in rows]
    for name in () if wide else shrinks:
        place = [*headers].index(name)
        excess = _width(table, headers) - WIDTH
        longest = max((len(row[place]) for row in table), default=0)
        if excess > 0:
            most = max(LEAST, len(name), longest - excess)
            for row in table:
                row[place] = shortened(row[place], most, keeps_end=name in keeps_end)
    return tabulate(table, headers=headers, disable_numparse=True)


def shortened(text: str, most: int, *, keeps_end: bool = False) -> str:
    """A text of at most so many characters; what was cut shows as an ellipsis."""
    if len(text) <= most:
        return text
    return CUT + text[1 - most :] if keeps_end else text[: most - 1] + CUT


def _width(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> int:
    padded = [name + " " * PADDING for name in headers]
    columns = [max(len(text) for text in column) for column in zip(padded, *rows, strict=True)]
    return sum(columns) + GAP * (len(columns) - 1)
