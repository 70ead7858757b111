"""A table whose rows the page can sort, keep together by ranks, and hide by the filter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, get_args

from harness.judge.parity import Parity
from harness.record.run import Status
from harness.report.cells import ReportCell
from harness.report.document import Align, Table
from harness.report.writers.page.text import text_html

LONG_TEXT = 60
"""Characters of a cell that is given room for several words a line."""
TOGETHER = ("job_id", "world_size", "nodes")
"""Columns whose values make a group of rows, which sorting keeps together."""
CELL_COLUMNS = ("job_id", "backend", "world_size", "nodes", "precision")
"""Columns that tell which cells a row is about."""
ORDERS: Mapping[str, Sequence[str]] = {
    # Where a run did not succeed the summary shows its status instead.
    "parity": (*get_args(Parity), *get_args(Status)),
    "status": get_args(Status),
    "level": get_args(Parity),
}
"""Values of a column in the order of their meaning."""


@dataclass(frozen=True)
class _Row:
    values: Sequence[Any]
    """Of the columns for people."""
    texts: Sequence[str]
    by_key: Mapping[str, Any]
    """Of all columns."""

    @property
    def group(self) -> tuple[Any, ...]:
        return tuple(self.by_key[key] for key in TOGETHER if key in self.by_key)


def table_html(table: Table, cells: Sequence[ReportCell]) -> str:
    """The table in a box that scrolls; `cells`: those of the report, which rows refer to by their number."""
    shown = table.for_people()
    keys = [column.key for column in table.columns]
    everything = [dict(zip(keys, values, strict=True)) for values in table.values()]
    rows = [_Row(*of) for of in zip(shown.values(), shown.texts(), everything, strict=True)]
    groups = [list(of) for _, of in groupby(rows, key=lambda row: row.group)]
    if len(groups) > len({row.group for row in rows}):
        groups = [rows]
    head = "".join(
        f'<th scope="col"{_side(column.align)}{" data-group" if column.key in TOGETHER else ""}>'
        f'<button type="button">{text_html(column.title)}</button></th>'
        for column in shown.columns
    )
    of_cells = _Finder(cells, [key for key in CELL_COLUMNS if key in keys])
    bodies = "".join(f"<tbody>\n{_lines(group, shown, of_cells)}\n</tbody>\n" for group in groups or [rows])
    caption = f"<caption>{text_html(table.caption)}</caption>" if table.caption else ""
    return f'<div class="table"><table>{caption}\n<thead>\n<tr>{head}</tr>\n</thead>\n{bodies}</table></div>'


class _Finder:
    """Numbers of the cells that a row is about."""

    def __init__(self, cells: Sequence[ReportCell], keys: Sequence[str]) -> None:
        self._keys = keys
        self._found: dict[tuple[Any, ...], list[int]] = {}
        for number, cell in enumerate(cells):
            self._found.setdefault(tuple(getattr(cell, key) for key in keys), []).append(number)

    def attribute(self, row: _Row) -> str:
        """Nothing for a row that is about no cell in particular: it is always shown."""
        if not self._keys:
            return ""
        found = self._found.get(tuple(row.by_key[key] for key in self._keys), [])
        return f' data-cells="{" ".join(map(str, found))}"' if found else ""


def _lines(rows: Sequence[_Row], table: Table, of_cells: _Finder) -> str:
    lines = []
    for row in rows:
        cells = "".join(
            _cell(text, value, column.key, column.align)
            for text, value, column in zip(row.texts, row.values, table.columns, strict=True)
        )
        lines.append(f"<tr{of_cells.attribute(row)}>{cells}</tr>")
    return "\n".join(lines)


def _cell(text: str, value: Any, key: str, side: Align) -> str:
    shape = ' class="long"' if len(text) > LONG_TEXT else _side(side)
    return f"<td{shape}{_order(value, key)}>{text_html(text)}</td>"


def _order(value: Any, key: str) -> str:
    """What the page sorts a cell by, unless it is its text; what is not known comes last."""
    match value:
        case str() if value in ORDERS.get(key, ()):
            return f' data-value="{ORDERS[key].index(value)}"'
        case int() | float() if not isinstance(value, bool) and not math.isnan(value):
            return f' data-value="{value!r}"'.replace("inf", "Infinity")
        case None | float():
            return " data-unknown"
    return ""


def _side(align: Align) -> str:
    return ' class="number"' if align == "right" else ""
