"""What a report consists of, whatever the format: sections of blocks.

Every string is plain text. A writer makes it harmless for its format; sections never escape anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any, Literal, TypeAlias

from harness.tell.formats import NOT_AVAILABLE

Align = Literal["left", "right"]


def plain(value: Any) -> str:
    """Text of a value without a unit; None as n/a."""
    return NOT_AVAILABLE if value is None else str(value)


@dataclass(frozen=True)
class Column:
    """A column of a table: `key` for programs, with the unit, as in the record; `title` for people."""

    key: str
    title: str
    show: Callable[[Any], str] = plain
    """Text of a raw value (bytes, seconds, ...), which may be None."""
    align: Align = "right"
    optional: bool = False
    """Left out where no row has a value in it."""
    only_values: bool = False
    """For programs: in CSV and JSON, not where people read."""


@dataclass(frozen=True)
class Shown:
    """A cell whose text for people says more than its value."""

    value: Any
    text: str
    is_strong: bool = False
    """Emphasised, where a format can."""
    section: str = ""
    """Key of the section of the details that the text names, for a link."""
    entry: str = ""
    """Name of an entry of that section, where a format can lead to one."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of raw values under their columns; CSV and JSON get the values, the others the text."""

    key: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def __post_init__(self) -> None:
        kept = [
            index
            for index, column in enumerate(self.columns)
            if not column.optional or any(row[index] is not None for row in self.rows)
        ]
        if len(kept) < len(self.columns):
            object.__setattr__(self, "columns", [self.columns[index] for index in kept])
            object.__setattr__(self, "rows", [[row[index] for index in kept] for row in self.rows])

    def for_people(self) -> Table:
        """The table without the columns for programs."""
        kept = [index for index, column in enumerate(self.columns) if not column.only_values]
        if len(kept) == len(self.columns):
            return self
        rows = [[row[index] for index in kept] for row in self.rows]
        return replace(self, columns=[self.columns[index] for index in kept], rows=rows)

    def named(self, rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
        """Cells of rows by the keys of their columns."""
        return [dict(zip([column.key for column in self.columns], row, strict=True)) for row in rows]

    def texts(self) -> list[list[str]]:
        return [
            [cell.text if isinstance(cell, Shown) else column.show(cell) for column, cell in self._pairs(row)]
            for row in self.rows
        ]

    def written(self, escape: Callable[[str], str], strong: str, link: str = "{}") -> list[list[str]]:
        """Cells of the rows in a format: `strong` holds a text that is emphasised there, as '**{}**', `link`
        one that leads to a section, as '[{}](#{})'; {2} is the entry in it."""

        def text_of(cell: Any, text: str) -> str:
            if isinstance(cell, Shown) and cell.section:
                return link.format(text, cell.section, cell.entry and f".{cell.entry}")
            return strong.format(text) if isinstance(cell, Shown) and cell.is_strong else text

        return [
            [text_of(cell, text) for cell, text in zip(row, map(escape, texts), strict=True)]
            for row, texts in zip(self.rows, self.texts(), strict=True)
        ]

    def values(self) -> list[list[Any]]:
        return [
            [cell.value if isinstance(cell, Shown) else cell for _, cell in self._pairs(row)]
            for row in self.rows
        ]

    def _pairs(self, row: Sequence[Any]) -> list[tuple[Column, Any]]:
        return list(zip(self.columns, row, strict=True))


@dataclass(frozen=True)
class Paragraph:
    """Sentences."""

    text: str


@dataclass(frozen=True)
class Line:
    """A sentence and where its evidence is."""

    text: str
    name: str = ""
    """Emphasised in front of the text."""
    details: str = ""
    """Key of the section of the details that shows the evidence; a report without it has no link."""


@dataclass(frozen=True)
class Items:
    """A list of lines; a pair is a name, which is emphasised, and its text."""

    items: Sequence[str | tuple[str, str] | Line]

    def lines(self) -> list[Line]:
        pairs = [("", item) if isinstance(item, str) else item for item in self.items]
        return [one if isinstance(one, Line) else Line(one[1], one[0]) for one in pairs]


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines to be shown as they are."""

    language: str
    text: str


def yaml_code(values: dict[str, Any]) -> Code:
    """Settings as lines of YAML, in their own order.

    Quoted as YAML 1.1 needs it, so that readers of either version understand them: Accelerate reads 1.1.
    """
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)  # type: ignore[assignment]
    yaml.default_flow_style, yaml.allow_unicode, yaml.width = False, True, 100
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = StringIO()
    yaml.dump(values, text)
    return Code("yaml", text.getvalue().removeprefix("%YAML 1.1\n---\n"))


@dataclass(frozen=True)
class Folded:
    """Blocks behind a title that opens them."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture, drawn when it is written: report.KEY.svg next to report.md."""

    key: str
    caption: str
    """What to see in it, and what was left out."""
    alt: str
    """What it shows, with its main figures, for those who do not see it."""
    chart: Callable[[], dict[str, Any]] = field(repr=False)
    """Its Vega-Lite specification with all data in it."""


Block: TypeAlias = Paragraph | Line | Items | Heading | Table | Picture | Code | Folded


@dataclass(frozen=True)
class Section:
    """A part of the report under a heading of its own."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A report: what it says first, and the details that its lines refer to."""

    title: str
    sections: Sequence[Section]
    details: Document | None = None
    heading: str = ""
    """Of each picture: models, ranks and batch."""

    def section_titles(self) -> dict[str, str]:
        """Title of every section by its key, those of the details included."""
        own = {section.key: section.title for section in self.sections}
        return own | (self.details.section_titles() if self.details else {})

    def pictures(self) -> list[Picture]:
        found = {block.key: block for block in self.blocks() if isinstance(block, Picture)}
        return list(found.values())

    def tables(self) -> list[Table]:
        return [block for block in self.blocks() if isinstance(block, Table)]

    def blocks(self) -> list[Block]:
        """Every block that is not itself a fold, in order."""
        own = [block for section in self.sections for block in _unfolded(section.blocks)]
        return own + (self.details.blocks() if self.details else [])


def _unfolded(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        yield from (_unfolded(block.blocks) if isinstance(block, Folded) else [block])
