"""A document as GitHub-flavoured markdown, as CSV and as JSON."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

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
from harness.tell.formats import markdown_text, one_line

_EMPTY_LINE = re.compile(r"(?<=\n)[^\S\n]*(?=\n)")
_NO_EMPTY_LINE = "&#32;"
_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")
_IN_HTML = re.compile(r"[*~\[`{]")
_BEGINS_A_BLOCK = re.compile(r"^(\d*)([-+=.)])(?=\s|$|-|=)")


def render_markdown(document: Document, pictures: Mapping[str, str], manifest: str, details: str) -> str:
    """The document without its details, which are in the file of that name.

    `pictures` holds the file name of each picture by its key.
    """
    parts = _parts(document, _Names(pictures, details, document.section_titles()))
    return "\n\n".join([*parts, f"<!-- {manifest} -->"]) + "\n"


def render_details(document: Document, pictures: Mapping[str, str], report: str) -> str:
    """The details by themselves, for a file next to the report of that name."""
    link = f"Details of [{markdown_text(report)}]({quote(report)}), which holds the list of records."
    title, *parts = _parts(document, _Names(pictures, "", document.section_titles()), anchors=True)
    return "\n\n".join([title, link, *parts]) + "\n"


@dataclass(frozen=True)
class _Names:
    """What a block needs from outside: files of the pictures by key, file of the details, its sections."""

    pictures: Mapping[str, str]
    details: str
    titles: Mapping[str, str]


def _parts(document: Document, names: _Names, *, anchors: bool = False) -> list[str]:
    parts = [f"# {markdown_text(document.title)}"]
    for section in document.sections:
        anchor = f'<a id="{section.key}"></a>\n\n' if anchors else ""
        parts.append(f"{anchor}## {markdown_text(section.title)}")
        parts += [_block(block, names) for block in section.blocks]
    return parts


def code_block(language: str, text: str) -> str:
    """A fenced block whose fence is longer than any run of backticks in the text.

    A reader without fences would take what follows an empty line, and tags, for markup: such text is escaped.
    """
    text = "\n".join(one_line(line, keep_spaces=True) for line in text.split("\n")).rstrip()
    if "<" in text or _EMPTY_LINE.search(text):
        escaped = _PUNCTUATION.sub(lambda found: f"&#{ord(found[0])};", text)
        return f"<pre><code>{_EMPTY_LINE.sub(_NO_EMPTY_LINE, escaped)}</code></pre>"
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def _block(block: Block, names: _Names) -> str:
    match block:
        case Paragraph():
            return _line(block.text)
        case Line():
            return _with_link(block, names)
        case Heading():
            return f"### {markdown_text(block.text)}"
        case Items():
            return "\n".join(f"- {_with_link(line, names)}" for line in block.lines())
        case Table():
            return table_markdown(block, names.details)
        case Picture():
            shown = f"![{markdown_text(block.alt)}]({quote(names.pictures[block.key])})"
            return f"{shown}\n\n{markdown_text(block.caption)}"
        case Code():
            return code_block(block.language, block.text)
        case Folded():
            inside = "\n\n".join(_block(part, names) for part in block.blocks)
            # A backslash escapes nothing within HTML.
            title = _IN_HTML.sub(lambda found: f"&#{ord(found[0])};", html.escape(one_line(block.title)))
            return f"<details><summary>{title}</summary>\n\n{inside}\n\n</details>"


def _with_link(line: Line, names: _Names) -> str:
    text = f"**{markdown_text(line.name)}**: {markdown_text(line.text)}" if line.name else _line(line.text)
    if line.details not in names.titles:
        return text
    title, _, _ = names.titles[line.details].partition(":")
    return f"{text} [{markdown_text(title)}]({quote(names.details)}#{line.details})"


def _line(text: str) -> str:
    """Text of a block of its own, in which it begins no list, rule or underline."""
    return _BEGINS_A_BLOCK.sub(r"\1\\\2", markdown_text(text))


def table_markdown(whole: Table, details: str = "") -> str:
    """Without padding, which would be a third of a long report; cells link to the file `details`."""
    table = whole.for_people()
    titles = [column.title for column in table.columns]
    rule = [":---" if column.align == "left" else "---:" for column in table.columns]
    link = f"[{{}}]({quote(details)}#{{}})"
    head, body = [markdown_text(title) for title in titles], table.written(markdown_text, "**{}**", link)
    text = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
    return f"{text}\n\n{markdown_text(table.caption)}" if table.caption else text


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
            {
                "key": section.key,
                "title": section.title,
                "blocks": [_block_content(b) for b in section.blocks],
            }
            for section in document.sections
        ],
    }


def _block_content(block: Block) -> dict[str, Any]:
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
            return {
                "kind": "table",
                "key": block.key,
                "caption": block.caption,
                "columns": [{"key": column.key, "title": column.title} for column in block.columns],
                "rows": block.named(block.values()),
            }
        case Picture():
            return {"kind": "picture", "key": block.key, "caption": block.caption, "alt": block.alt}
        case Code():
            return {"kind": "code", "language": block.language, "text": block.text}
        case Folded():
            return {
                "kind": "folded",
                "title": block.title,
                "blocks": [_block_content(b) for b in block.blocks],
            }
