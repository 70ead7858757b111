"""The filter of a page: what it may choose from, and the cells as data."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.cells import ReportCell
from harness.report.formats import one_line
from harness.report.writers.page.text import data_script, text_html

DIMENSIONS = {"backend": "backend", "ranks": "world_size", "nodes": "nodes", "precision": "precision"}
"""Name in the page, in its address and in the data of pictures; field of a cell."""


def filter_html(cells: Sequence[ReportCell]) -> str:
    """A menu with a box for each value, which the page's script shows; empty if there is no choice."""
    facts = [_facts(cell) for cell in cells]
    choices = {name: list(dict.fromkeys(of[name] for of in facts)) for name in DIMENSIONS}
    parts = [_choice(name, values) for name, values in choices.items() if len(values) > 1]
    if not parts:
        return ""
    return (
        '<details class="menu" id="filter" hidden>'
        '<summary>Filter: <output role="status"></output></summary>\n'
        f'<form id="choices">\n{"".join(parts)}</form>\n</details>\n'
        '<button type="reset" form="choices" hidden>Show all</button>'
    )


def cells_script(cells: Sequence[ReportCell]) -> str:
    """The cells in their order, as the page's script reads them."""
    return data_script("cells", [_facts(cell) for cell in cells])


def _facts(cell: ReportCell) -> dict[str, str]:
    return {name: one_line(str(getattr(cell, field))) for name, field in DIMENSIONS.items()}


def _choice(name: str, values: Sequence[str]) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" name="{name}" value="{text_html(value)}" checked> '
        f"{text_html(value)}</label>\n"
        for value in values
    )
    buttons = " ".join(
        f'<button type="button" data-choose="{what}" aria-label="{name}: {what}">{what}</button>'
        for what in ("all", "none")
    )
    return f"<fieldset><legend>{name} {buttons}</legend>\n{boxes}</fieldset>\n"
