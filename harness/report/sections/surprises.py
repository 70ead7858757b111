"""Every difference from the textbook or from a default that the records show."""

from __future__ import annotations

from harness.judge.cell import name_cells
from harness.judge.comparison import Comparison
from harness.judge.surprises import surprises
from harness.report.document import Column, Paragraph, Section, Table

KEY = "surprises_all"
TITLE = "Differences: from the textbook and from defaults"
TEXT = (
    "Shown only where measured bytes and states are those of the closed form of the implementation, whose "
    "terms name the cause; anything else is a finding. Figures relate one cause alone to the textbook: the "
    "ZeRO paper (arXiv 1910.02054) and the FSDP paper (arXiv 2304.11277), one synchronisation per step."
)
COLUMNS = (
    Column("cells", "cells", align="left"),
    Column("difference", "difference", align="left"),
    Column("origin", "where it comes from", align="left"),
    Column("advice", "what to do", align="left"),
    Column("since", "since when, and source", align="left"),
    Column("id", "id", align="left", only_values=True),
    Column("figures", "figures", align="left", only_values=True),
)


def surprises_all_section(comparison: Comparison) -> Section | None:
    """One line each, largest effect first; None where there are none."""
    rows = [
        [
            name_cells(surprise.cells), surprise.what, surprise.origin, surprise.behaviour.advice,
            surprise.behaviour.since, surprise.behaviour.id, surprise.figure,
        ]
        for surprise in surprises(comparison)
    ]  # fmt: skip
    if not rows:
        return None
    table = Table(key="surprises", columns=COLUMNS, rows=rows)
    return Section(KEY, TITLE, [Paragraph(TEXT), table])
