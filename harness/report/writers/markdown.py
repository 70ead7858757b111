"""A document as GitHub-flavoured markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from urllib.parse import quote

from harness.report.document import (
    Block,
    Code,
    Document,
    Folded,
    Heading,
    Items,
    Paragraph,
    Picture,
    Table,
)
from harness.report.formats import markdown_text, one_line

_BEGINS_A_BLOCK = re.compile(r"^(\d*)([-+=.)])(?=\s|$|-|=)")


def render_markdown(document: Document, pictures: Mapping[str, str], manifest: str) -> str:
    """The document; `pictures` holds the file name of each picture by its key."""
    parts = [f"# {markdown_text(document.title)}"]
    for section in document.sections:
        parts.append(f"## {markdown_text(section.title)}")
        parts += [_block(block, pictures) for block in section.blocks]
    parts.append(f"<!-- {manifest} -->")
    return "\n\n".join(parts) + "\n"


def code_block(language: str, text: str) -> str:
    """A fenced block whose fence is longer than any run of backticks in the text."""
    text = "\n".join(one_line(line, keep_spaces=True) for line in text.split("\n"))
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _block(block: Block, pictures: Mapping[str, str]) -> str:
    match block:
        case Paragraph():
            return _line(block.text)
        case Heading():
            return f"### {markdown_text(block.text)}"
        case Items():
            return "\n".join(f"- {_item(item)}" for item in block.items)
        case Table():
            return _table(block.for_people())
        case Picture():
            caption = markdown_text(block.caption)
            return f"![{caption}]({quote(pictures[block.key])})\n\n{caption}"
        case Code():
            return code_block(block.language, block.text)
        case Folded():
            inside = "\n\n".join(_block(part, pictures) for part in block.blocks)
            title = html.escape(one_line(block.title))
            return f"<details><summary>{title}</summary>\n\n{inside}\n\n</details>"


def _item(item: str | tuple[str, str]) -> str:
    if isinstance(item, str):
        return _line(item)
    name, text = item
    return f"**{markdown_text(name)}**: {markdown_text(text)}"


def _line(text: str) -> str:
    """Text of a block of its own, in which it begins no list, rule or underline."""
    return _BEGINS_A_BLOCK.sub(r"\1\\\2", markdown_text(text))


def _table(table: Table) -> str:
    """Without padding, which would be a third of a long report."""
    titles = [column.title for column in table.columns]
    rule = [":---" if column.align == "left" else "---:" for column in table.columns]
    head, *body = ([markdown_text(cell) for cell in row] for row in (titles, *table.texts()))
    text = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
    return f"{text}\n\n{markdown_text(table.caption)}" if table.caption else text
