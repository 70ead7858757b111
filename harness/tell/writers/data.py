"""A document for programs: JSON with everything, CSV with the tables; raw values under their keys."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import Any

from harness.safe_text import harmless
from harness.tell.document import (
    Block,
    Code,
    Document,
    Folded,
    Heading,
    Items,
    Line,
    Paragraph,
    Picture,
    Table,
)

MAIN = ("results", "changes")
MANIFEST = "manifest"
# A spreadsheet would run a cell that begins with one of these.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render_csv(document: Document, manifest: str) -> tuple[str, dict[str, str]]:
    """The main table, and the others by their keys; raw values, keys of the columns as header."""
    tables = {}
    for table in document.tables():
        target = io.StringIO()
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow([column.key for column in table.columns])
        writer.writerows([[_cell(value) for value in row] for row in table.values()])
        tables[table.key] = target.getvalue()
    main = next((tables.pop(key) for key in MAIN if key in tables), "")
    return main, tables | {MANIFEST: f"{manifest}\n"}


def _cell(value: Any) -> Any:
    """None is an empty cell; text stays text, without control characters."""
    if not isinstance(value, str):
        return value
    return harmless(f"'{value}" if value.startswith(_FORMULA) else value)


def render_json(document: Document, manifest: str) -> str:
    """One JSON document; numbers are bytes, seconds and ratios, as the keys of the columns say."""
    content = _content(document)
    if document.details is not None:
        content["details"] = _content(document.details)
    text = harmless(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    end = "\n}"
    name, _, values = manifest.partition(": ")
    # On a line of its own, as a reader of any format finds it.
    return f'{text.removesuffix(end)},\n "{name}": {values}{end}\n'


def _content(document: Document) -> dict[str, Any]:
    return {
        "title": document.title,
        "sections": [
            {"key": section.key, "title": section.title, "blocks": [_block(b) for b in section.blocks]}
            for section in document.sections
        ],
    }


def _block(block: Block) -> dict[str, Any]:
    match block:
        case Paragraph():
            return {"kind": "paragraph", "text": block.text}
        case Line():
            return {"kind": "line", **asdict(block)}
        case Heading():
            return {"kind": "heading", "text": block.text}
        case Items():
            return {
                "kind": "items",
                "items": [asdict(item) if isinstance(item, Line) else item for item in block.items],
            }
        case Table():
            keys = [column.key for column in block.columns]
            return {
                "kind": "table",
                "key": block.key,
                "caption": block.caption,
                "columns": [{"key": column.key, "title": column.title} for column in block.columns],
                "rows": [dict(zip(keys, row, strict=True)) for row in block.values()],
            }
        case Picture():
            return {"kind": "picture", "key": block.key, "caption": block.caption, "alt": block.alt}
        case Code():
            return {"kind": "code", "language": block.language, "text": block.text}
        case Folded():
            return {"kind": "folded", "title": block.title, "blocks": [_block(b) for b in block.blocks]}
