"""Tables on a terminal that fit its width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH = 100
"""Characters of a line without --wide."""
LEAST = 12
"""Characters of a column that is shortened."""
GAP = "  "
CUT = "…"


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
    widths = _widths(table, headers)
    right = [(alignments or {}).get(name) == "right" for name in headers]
    lines = [headers, ["-" * width for width in widths], *table]
    return "\n".join(
        GAP.join(
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def shortened(text: str, most: int, *, keeps_end: bool = False) -> str:
    """A text of at most so many characters; what was cut shows as an ellipsis."""
    if len(text) <= most:
        return text
    return CUT + text[1 - most :] if keeps_end else text[: most - 1] + CUT


def _widths(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> list[int]:
    return [max(len(text) for text in column) for column in zip(headers, *rows, strict=True)]
