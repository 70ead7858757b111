"""The main table, and how far repeats spread."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.compare.repeats import most_rivals
from harness.compare.statistics import LEVEL, pairs_among, runs_to_judge
from harness.compare.wording import counted
from harness.report.document import Block, Folded, Paragraph, Section
from harness.report.formats import percent
from harness.report.pictures.trade_off import trade_off_picture
from harness.report.tables import NOT_JUDGED, WITHIN_NOISE, results_table, spread_table


def results_section(comparison: Comparison) -> Section:
    """One line per job, backend and world size; the spread is folded."""
    blocks: list[Block] = [results_table(comparison)]
    spread = spread_table(comparison)
    if spread is not None:
        groups = comparison.groups
        runs = max(len(group.rows) for group in groups)
        cells = most_rivals(groups)
        text = (
            f"of fastest: throughput relative to the fastest of the same job and number of ranks; n/a for "
            f"a run that diverged, since it did other work. {WITHIN_NOISE}: "
            f"within the noise of it at {percent(LEVEL)} for all cells together. {NOT_JUDGED}: too few runs "
            f"to test a difference against noise; with {max(2, cells)} cells to compare each needs "
            f"{runs_to_judge(pairs_among(cells))} runs."
        )
        title = f"Repeats and spread: {counted(runs, 'run')} of each cell at most"
        blocks += [Paragraph(text), Folded(title, [spread])]
    picture = trade_off_picture(comparison)
    if picture is not None:
        blocks.append(picture)
    return Section("results", "Results", blocks)
