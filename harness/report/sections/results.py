"""The main table, and how far repeats spread."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.repeats import group_repeats
from harness.compare.rows import Row
from harness.compare.statistics import FEWEST_RUNS, LEVEL
from harness.report.document import Block, Folded, Paragraph, Section
from harness.report.formats import percent
from harness.report.pictures.trade_off import trade_off_picture
from harness.report.tables import NOT_JUDGED, WITHIN_NOISE, results_table, spread_table


def results_section(rows: Sequence[Row]) -> Section:
    """One line per job, backend and world size; the spread folded."""
    blocks: list[Block] = [results_table(rows)]
    spread = spread_table(rows)
    if spread is not None:
        runs = max(len(group.rows) for group in group_repeats(rows))
        text = (
            f"of fastest: throughput beside the fastest of the same job and number of ranks; n/a for "
            f"a run that left the reference, since it did other work. {WITHIN_NOISE}: "
            f"within the noise of it, its {percent(LEVEL)} interval holds 100 %. {NOT_JUDGED}: fewer than "
            f"{FEWEST_RUNS} runs of one of the two, so nobody can tell the difference from noise."
        )
        title = f"Repeats and spread: {runs} run{'s' if runs > 1 else ''} of each cell at most"
        blocks += [Paragraph(text), Folded(title, [spread])]
    picture = trade_off_picture(rows)
    if picture is not None:
        blocks.append(picture)
    return Section("results", "Results", blocks)
