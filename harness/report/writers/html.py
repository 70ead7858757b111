"""A document as one HTML file that needs nothing else: styles, pictures and sorting are within it."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.report.document import (
    Align,
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
from harness.report.formats import one_line

HERE = Path(__file__).parent
# Nothing may be fetched, whatever a record holds.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)
LONG_TEXT = 60
"""Characters of a cell that is given room for several words a line."""
DATA_ADDRESS = re.compile(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)")


def render_html(document: Document, pictures: Mapping[str, str], manifest: str) -> str:
    """The document; `pictures` holds the data address of each picture by its key."""
    titles = document.section_titles()
    body = [f"<h1>{_text(document.title)}</h1>", *_sections(document, pictures, titles)]
    if document.details is not None:
        details = document.details
        links = [f'<a href="#{_text(part.key)}">{_text(part.title)}</a>' for part in details.sections]
        body += [f"<h1>{_text(details.title)}</h1>", f"<nav>{' '.join(links)}</nav>"]
        body += _sections(details, pictures, titles)
    style = (HERE / "report.css").read_text(encoding="utf-8")
    script = (HERE / "report.js").read_text(encoding="utf-8")
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(document.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
    )
    tail = f"\n</main>\n<script>\n{script}</script>\n<!-- {manifest} -->\n</body>\n</html>\n"
    return head + "\n".join(body) + tail


def data_address(image: bytes) -> str:
    """An SVG picture as an address that holds it whole."""
    return f"data:image/svg+xml;base64,{base64.b64encode(image).decode('ascii')}"


def _sections(document: Document, pictures: Mapping[str, str], titles: Mapping[str, str]) -> list[str]:
    body = []
    for section in document.sections:
        body.append(f'<section id="{_text(section.key)}"><h2>{_text(section.title)}</h2>')
        body += [_block(block, pictures, titles) for block in section.blocks]
        body.append("</section>")
    return body


def _block(block: Block, pictures: Mapping[str, str], titles: Mapping[str, str]) -> str:
    match block:
        case Paragraph():
            return f"<p>{_text(block.text)}</p>"
        case Line():
            return f"<p>{_line(block, titles)}</p>"
        case Heading():
            return f"<h3>{_text(block.text)}</h3>"
        case Items():
            return (
                "<ul>\n" + "\n".join(f"<li>{_line(line, titles)}</li>" for line in block.lines()) + "\n</ul>"
            )
        case Table():
            return _table(block.for_people())
        case Picture():
            caption = _text(block.caption)
            return (
                f'<figure><img src="{pictures[block.key]}" alt="{caption}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
        case Code():
            return f"<pre><code>{html.escape(_printable_lines(block.text))}</code></pre>"
        case Folded():
            inside = "\n".join(_block(part, pictures, titles) for part in block.blocks)
            return f"<details><summary>{_text(block.title)}</summary>\n{inside}\n</details>"


def _line(line: Line, titles: Mapping[str, str]) -> str:
    text = f"<strong>{_text(line.name)}</strong>: {_text(line.text)}" if line.name else _text(line.text)
    if not line.details:
        return text
    return f'{text} <a href="#{_text(line.details)}">{_text(titles[line.details])}</a>'


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{_side(column.align)}><button type="button">{_text(column.title)}</button></th>'
        for column in table.columns
    )
    lines = [f"<tr>{head}</tr>"]
    aligned = [column.align for column in table.columns]
    for texts, values in zip(table.texts(), table.values(), strict=True):
        cells = zip(texts, values, aligned, strict=True)
        lines.append("<tr>" + "".join(_cell(text, value, side) for text, value, side in cells) + "</tr>")
    head_row, *rows = lines
    body = "\n".join(rows)
    caption = f"<caption>{_text(table.caption)}</caption>" if table.caption else ""
    return (
        f'<div class="table"><table>{caption}\n<thead>\n{head_row}\n</thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cell(text: str, value: Any, side: Align) -> str:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    key = "" if number is None else f' data-value="{number!r}"'
    shape = ' class="long"' if len(text) > LONG_TEXT else _side(side)
    return f"<td{shape}{key}>{_text(text)}</td>"


def _side(align: Align) -> str:
    return ' class="number"' if align == "right" else ""


def _text(text: str) -> str:
    return html.escape(one_line(text))


def _printable_lines(text: str) -> str:
    return "\n".join(one_line(line, keep_spaces=True) for line in text.rstrip().split("\n"))
