"""A document as one HTML file that needs nothing else: styles, pictures and scripts are within it."""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import groupby
from operator import itemgetter
from typing import Any, get_args

from harness.judge.agreement.parity import Parity
from harness.record.run import Status
from harness.tell.document import (
    Align,
    Block,
    Code,
    Column,
    Document,
    Folded,
    Heading,
    Items,
    Line,
    Paragraph,
    Picture,
    Table,
)
from harness.tell.formats import one_line


def text_html(text: str) -> str:
    """Plain text on one line, for an element or an attribute."""
    return html.escape(one_line(text))


def lines_html(text: str) -> str:
    """Plain text with its line breaks and spaces."""
    return html.escape("\n".join(one_line(line, keep_spaces=True) for line in text.rstrip().split("\n")))


LONG_TEXT = 60
"""Characters of a cell that is given room for several words a line."""
TOGETHER = ("job_id", "world_size", "nodes")
"""Columns whose values make a group of rows, which sorting keeps together."""
ORDERS: Mapping[str, Sequence[str]] = {
    # Where a run did not succeed the summary shows its status instead.
    "parity": (*get_args(Parity), *get_args(Status)),
    "status": get_args(Status),
    "level": get_args(Parity),
}
"""Values of a column in the order of their meaning."""


WIDEST = 4
"""Columns of a table that fits a narrow screen."""


def table_html(table: Table, *, folds: bool = False) -> str:
    """The table in a box that scrolls.

    `folds`: on a narrow screen rows of more than `WIDEST` columns are blocks, each figure below its title.
    """
    shown = table.for_people()
    folds = folds and len(shown.columns) > WIDEST
    texts = shown.written(text_html, "<b>{}</b>", '<a href="#{1}{2}">{0}</a>')
    rows: list[tuple[tuple[Any, ...], str]] = []
    for values, row_texts, by_key in zip(shown.values(), texts, table.named(table.values()), strict=True):
        parts = zip(row_texts, values, shown.columns, strict=True)
        line = "".join(_cell(*part, with_title=folds) for part in parts)
        group = tuple(by_key[key] for key in TOGETHER if key in by_key)
        rows.append((group, f"<tr>{line}</tr>"))
    groups = [[line for _, line in of] for _, of in groupby(rows, key=itemgetter(0))]
    if len(groups) > len({group for group, _ in rows}) or not groups:
        groups = [[line for _, line in rows]]
    bodies = "".join("<tbody>\n{}\n</tbody>\n".format("\n".join(lines)) for lines in groups)
    head = "".join(
        f'<th scope="col"{_side(column.align)}{" data-group" if column.key in TOGETHER else ""}>'
        f'<button type="button">{text_html(column.title)}</button></th>'
        for column in shown.columns
    )
    caption = f"<caption>{text_html(table.caption)}</caption>" if table.caption else ""
    shape = "table folds" if folds else "table"
    return (
        f'<div class="{shape}"><table>{caption}\n<thead>\n<tr>{head}</tr>\n</thead>\n{bodies}</table></div>'
    )


def _cell(text: str, value: Any, column: Column, *, with_title: bool) -> str:
    shape = ' class="long"' if len(text) > LONG_TEXT else _side(column.align)
    title = f' data-title="{text_html(column.title)}"' if with_title else ""
    return f"<td{shape}{title}{_order(value, column.key)}>{text}</td>"


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


PAGE = "report.html.jinja"
STYLES = ("report.css", "page/layout.css", "page/print.css")
SCRIPTS = ("page/navigation.js", "page/sort.js")
DATA_ADDRESS = re.compile(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)")
PLAIN_NAME = re.compile(r"[a-z0-9-]+")
"""Of an item that a link may lead to, such as a finding."""


def render_html(document: Document, pictures: Mapping[str, str], manifest: str) -> str:
    """The document; `pictures` holds the data address of each picture by its key."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    page = _Page(document, pictures)
    environment = Environment(
        loader=PackageLoader(__package__, "page"), undefined=StrictUndefined, keep_trailing_newline=True,
        trim_blocks=True,
    )  # fmt: skip
    environment.filters |= {"text": text_html, "block": page.block}
    # The first screen holds what comes up to the first section with a table.
    lengths = (
        n for n, part in enumerate(document.sections, 1) if any(isinstance(b, Table) for b in part.blocks)
    )
    count = next(lengths, len(document.sections)) if document.details else 0
    answer, more = document.sections[:count], document.sections[count:]
    own = (Document("", answer).pictures() or document.pictures()[:1]) if document.details else []
    return environment.get_template(PAGE).render(
        document=document,
        answer=[
            replace(part, blocks=[block for block in part.blocks if not isinstance(block, Picture)])
            for part in answer
        ],
        more=more,
        pictures=[page.picture(picture) for picture in own],
        styles=_assets(STYLES),
        scripts=_assets(SCRIPTS),
        manifest=manifest,
    )


def data_address(image: bytes) -> str:
    """An SVG picture as an address that holds it whole."""
    return f"data:image/svg+xml;base64,{base64.b64encode(image).decode('ascii')}"


def _assets(names: Sequence[str]) -> str:
    folder = files(__package__)
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


class _Page:
    """Renders the blocks of a page in their order."""

    def __init__(self, document: Document, pictures: Mapping[str, str]) -> None:
        short = document.sections if document.details else []
        self._short = {block.key for part in short for block in part.blocks if isinstance(block, Table)}
        self._pictures = pictures
        self._titles = document.section_titles()
        self._shown: set[str] = set()
        """Keys of the pictures so far; a picture is shown where it comes first."""
        self._targets = _targets(document.details)
        self._named: set[str] = set()
        """Targets so far."""

    def block(self, block: Block) -> str:
        match block:
            case Paragraph():
                return f"<p>{text_html(block.text)}</p>"
            case Line():
                return f"<p>{self._line(block)}</p>"
            case Heading():
                return f"<h3>{text_html(block.text)}</h3>"
            case Items():
                return "<ul>\n" + "\n".join(self._item(line) for line in block.lines()) + "\n</ul>"
            case Table():
                return table_html(block, folds=block.key in self._short)
            case Picture() if block.key in self._shown:
                return f"<p>{_link(f'picture-{block.key}', block.caption)}</p>"
            case Picture():
                return self.picture(block)
            case Code():
                return f"<pre><code>{lines_html(block.text)}</code></pre>"
            case Folded():
                inside = "\n".join(map(self.block, block.blocks))
                return f"<details><summary>{text_html(block.title)}</summary>\n{inside}\n</details>"

    def picture(self, picture: Picture) -> str:
        self._shown.add(picture.key)
        alt, key = text_html(picture.alt), text_html(picture.key)
        return (
            f'<figure id="picture-{key}">'
            f'<div class="picture"><img src="{self._pictures[picture.key]}" alt="{alt}"></div>'
            f"<figcaption>{text_html(picture.caption)}</figcaption></figure>"
        )

    def _item(self, line: Line) -> str:
        """An item of a list; the first of the details with a name that a line refers to is its target."""
        target = self._targets.get(line.name)
        if line.details or target is None or target in self._named:
            return f"<li>{self._line(line)}</li>"
        self._named.add(target)
        return f'<li id="{target}">{self._line(line)}</li>'

    def _line(self, line: Line) -> str:
        name = f"<strong>{text_html(line.name)}</strong>" if line.name else ""
        if line.details and line.name in self._targets:
            name = f'<a href="#{self._targets[line.name]}">{name}</a>'
        text = f"{name}: {text_html(line.text)}" if name else text_html(line.text)
        title = self._titles.get(line.details)
        return text if title is None else f"{text} {_link(line.details, title)}"


def _link(key: str, title: str) -> str:
    return f'<a href="#{text_html(key)}">{text_html(title)}</a>'


def _targets(details: Document | None) -> dict[str, str]:
    """Where the details say most about a name: its finding, else the first section that has it."""
    if details is None:
        return {}
    return {
        line.name: f"{section.key}.{line.name}"
        for section in (*reversed(details.sections), *(s for s in details.sections if s.key == "findings"))
        for block in section.blocks
        if isinstance(block, Items)
        for line in block.lines()
        if PLAIN_NAME.fullmatch(line.name)
    }
