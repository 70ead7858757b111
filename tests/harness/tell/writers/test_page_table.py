"""Rows of a page's table: their groups, what they are sorted by, and the cells that they are about."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from harness.tell.document import Column, ReportCell, Shown, Table
from harness.tell.writers.html import table_html

BACKEND, RANKS, PARITY = (
    Column("backend", "backend"),
    Column("world_size", "ranks"),
    Column("parity", "parity"),
)
VALUE = Column("value", "value")
CELLS = [
    ReportCell(job_id="a", backend=backend, world_size=size, nodes=1, precision=precision)
    for backend, size, precision in (
        ("ddp", 2, "fp32"), ("zero3", 2, "fp32"), ("ddp", 4, "fp32"), ("zero3", 4, "bf16-mixed"),
    )
]  # fmt: skip


def html_of(columns: Sequence[Column], *rows: list[Any]) -> str:
    return table_html(Table(key="t", columns=columns, rows=rows), CELLS)


def test_rows_that_stand_together_by_ranks_are_a_group() -> None:
    text = html_of((BACKEND, RANKS), ["ddp", 2], ["zero3", 2], ["ddp", 4])
    assert [body.count("<tr") for body in re.findall(r"<tbody>.*?</tbody>", text, re.DOTALL)] == [2, 1]


def test_rows_whose_order_mixes_ranks_are_one_group() -> None:
    text = html_of((BACKEND, RANKS), ["ddp", 2], ["ddp", 4], ["zero3", 2], ["zero3", 4])
    assert text.count("<tbody>") == 1


@pytest.mark.parametrize(
    ("columns", "row", "cells"),
    [
        ((BACKEND, RANKS), ["ddp", 4], "2"),
        ((BACKEND, VALUE), ["zero3", 1.0], "1 3"),
        ((Column("precision", "precision"),), ["bf16-mixed"], "3"),
        ((BACKEND, RANKS), ["all", 2], None),
        ((VALUE,), [2], None),
    ],
)
def test_a_row_names_every_cell_that_it_is_about(
    columns: Sequence[Column], row: list[Any], cells: str | None
) -> None:
    found = re.search(r'<tr data-cells="([^"]*)">', html_of(columns, row))
    assert (found[1] if found else None) == cells


def test_a_column_that_people_do_not_see_still_tells_the_cell() -> None:
    hidden = Column("world_size", "ranks", only_values=True)
    text = html_of((BACKEND, hidden), ["ddp", 4])
    assert 'data-cells="2"' in text
    assert "ranks" not in text


@pytest.mark.parametrize(
    ("column", "value", "attribute"),
    [
        (PARITY, "exact", ' data-value="0"'),
        (PARITY, "diverged", ' data-value="3"'),
        (PARITY, None, " data-unknown"),
        (VALUE, 1.5, ' data-value="1.5"'),
        (VALUE, float("inf"), ' data-value="Infinity"'),
        (VALUE, float("nan"), " data-unknown"),
        (VALUE, Shown(3, "three"), ' data-value="3"'),
        (VALUE, "text", ""),
        (VALUE, True, ""),
    ],
)
def test_a_cell_is_sorted_by_value_or_meaning(column: Column, value: Any, attribute: str) -> None:
    assert f'<td class="number"{attribute}>' in html_of((column,), [value])
