"""A document as JSON: tables with raw values under their keys, text as it is."""

from __future__ import annotations

import json
from typing import Any

from harness.report.document import Block, Code, Document, Folded, Heading, Items, Paragraph, Picture, Table


def render_json(document: Document, manifest: str) -> str:
    """One JSON document; numbers are bytes, seconds and ratios, as the keys of the columns say."""
    content = {
        "title": document.title,
        "sections": [
            {"key": section.key, "title": section.title, "blocks": [_block(b) for b in section.blocks]}
            for section in document.sections
        ],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    end = "\n}"
    name, _, values = manifest.partition(": ")
    # On a line of its own, as a reader of any format finds it.
    return f'{text.removesuffix(end)},\n "{name}": {values}{end}\n'


def _block(block: Block) -> dict[str, Any]:
    match block:
        case Paragraph():
            return {"kind": "paragraph", "text": block.text}
        case Heading():
            return {"kind": "heading", "text": block.text}
        case Items():
            return {"kind": "items", "items": [list(i) if isinstance(i, tuple) else i for i in block.items]}
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
            return {"kind": "picture", "key": block.key, "caption": block.caption}
        case Code():
            return {"kind": "code", "language": block.language, "text": block.text}
        case Folded():
            return {"kind": "folded", "title": block.title, "blocks": [_block(b) for b in block.blocks]}
