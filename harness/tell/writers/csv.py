"""The tables of a document as CSV: the main table in the report's own file, others next to it."""

from __future__ import annotations

import csv
import io
from typing import Any

from harness.tell.document import Document, Table

MAIN = ("results", "changes")
MANIFEST = "manifest"
# A spreadsheet would run a cell that begins with one of these.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render_csv(document: Document, manifest: str) -> tuple[str, dict[str, str]]:
    """The main table, and the others by their keys; raw values, keys of the columns as header."""
    tables = {table.key: _table(table) for table in document.tables()}
    main = next((tables.pop(key) for key in MAIN if key in tables), "")
    return main, tables | {MANIFEST: f"{manifest}\n"}


def _table(table: Table) -> str:
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    writer.writerows([[_cell(value) for value in row] for row in table.values()])
    return target.getvalue()


def _cell(value: Any) -> Any:
    """None is an empty cell; text stays text."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
