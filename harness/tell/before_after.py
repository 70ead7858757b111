"""The report of the same job before and after a change of versions, machine or options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.judge.changes import Change, changes, pairs, settings, shares_sessions
from harness.judge.comparison import Comparison
from harness.judge.facts import metrics_in
from harness.judge.statistics import LEVEL, runs_to_judge
from harness.judge.wording import CellName, listed
from harness.tell.document import (
    Block,
    Column,
    Document,
    Folded,
    Heading,
    Items,
    Paragraph,
    Section,
    Shown,
    Table,
    plain,
    report_cells,
)
from harness.tell.formats import percent, signed_percent
from harness.tell.sections.job import machine_section
from harness.tell.sections.results import findings_section
from harness.tell.tables import LABELS, figure_text, not_comparable_table, prose, results_table, table_columns

TITLE = "Comparison with a baseline"
BY_ROUND = " " + prose("before_after_by_round", level=percent(LEVEL))
MOST_OPEN = 3
"""Untested figures that the verdict names."""


def before_after(before: Comparison, after: Comparison, *last: Section) -> Document:
    """The report of two comparisons; `last` follows what is computed from them alone.

    Runs that are not the same job as the others of their side stand in `_sides` only.
    """
    left, right = before.comparable, after.comparable
    found = changes(left, right)
    sections = [
        _verdict(left, right, found),
        _settings(left, right),
        _figures(found),
        _statuses(before, after),
        _sides(before, after),
        _reading(_on_both_sides(left, right), by_round=any(change.ratio for change in found)),
        *last,
    ]
    cells = list(dict.fromkeys([*report_cells(before), *report_cells(after)]))
    return Document(TITLE, [section for section in sections if section is not None], cells=cells)


def _verdict(before: Comparison, after: Comparison, found: Sequence[Change]) -> Section:
    sentences = [_same_job(before, after)]
    both = _on_both_sides(before, after)
    if both and not shares_sessions(before, after):
        sentences.append(prose("before_after_other_sessions"))
    sentences.append(f"{both} cells (backend and number of ranks) are on both sides.")
    sentences += _lost_and_new(before, after)
    moved = [c for c in found if c.judgement == "beyond noise"]
    for metric in metrics_in("changes"):
        lines = [_moved(change) for change in moved if change.metric is metric and metric.follows is None]
        if lines:
            sentences.append(f"Beyond noise, {metric.title} changed for {listed(lines)}.")
    open_ = sorted((c for c in found if c.judgement == "not judged"), key=lambda c: -abs(c.relative or 0.0))
    if not moved and found and not open_:
        sentences.append("No figure of these cells changed beyond noise.")
    if open_:
        largest = [
            f"{c.metric.title} of {c.backend} on {c.world_size} by {signed_percent(c.relative)}"
            for c in open_[:MOST_OPEN]
        ]
        sentences.append(
            f"{len(open_)} of {len(found)} figures differ and are not tested against noise, which takes "
            f"{runs_to_judge(both)} runs on each side; the largest: {listed(largest)}."
        )
    return Section("verdict", "Verdict", [Items(sentences)])


def _on_both_sides(before: Comparison, after: Comparison) -> int:
    return sum(pair.before is not None and pair.after is not None for pair in pairs(before, after))


def _moved(change: Change) -> str:
    """'ddp on 2 by +5.0 % (worse)'."""
    text = f"{change.backend} on {change.world_size} by {signed_percent(change.relative)}"
    return text if change.is_worse is None else f"{text} ({'worse' if change.is_worse else 'better'})"


def _lost_and_new(before: Comparison, after: Comparison) -> list[str]:
    """Cells that succeeded on one side only, and their status on the other."""
    lost, new = [], []
    for pair in pairs(before, after):
        well = [side is not None and side.succeeded for side in (pair.before, pair.after)]
        title = str(CellName(pair.backend, pair.world_size))
        if well == [True, False]:
            lost.append(f"{title} ({pair.after.status if pair.after else 'not comparable, or absent'})")
        elif well == [False, True]:
            new.append(f"{title} ({pair.before.status if pair.before else 'not comparable, or absent'})")
    sentences = []
    if lost:
        sentences.append(f"Lost, with their status after: {listed(lost)}.")
    if new:
        sentences.append(f"New, with their status before: {listed(new)}.")
    return sentences


def _same_job(before: Comparison, after: Comparison) -> str:
    left = set(before.by_job)
    right = set(after.by_job)
    if left == right and len(left) == 1:
        return f"Both sides ran job {left.pop()}."
    return (
        f"The sides did not run the same job: {listed(sorted(left))} before, {listed(sorted(right))} after. "
        "Their figures are no measure of a change in speed or memory."
    )


def _settings(before: Comparison, after: Comparison) -> Section:
    found = settings(before, after)
    title = "Settings that differ"
    if not found:
        return Section("settings", title, [Paragraph("None in the records.")])
    columns = [Column(key, title, align="left") for key, title in (
        ("backend", "backend"), ("field", "field"), ("before", "before"), ("after", "after"),
    )]  # fmt: skip

    def table(key: str, body: list[list[Any]]) -> Table:
        return Table(key=key, columns=columns, rows=body)

    shared = [["all", s.field, _text(s.before), _text(s.after)] for s in found if not s.backend]
    own = [[s.backend, s.field, _text(s.before), _text(s.after)] for s in found if s.backend]
    blocks: list[Block] = [table("settings", shared)] if shared else []
    if own:
        blocks.append(Folded(f"Of single backends: {len(own)}", [table("own_settings", own)]))
    return Section("settings", title, blocks)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _figures(found: Sequence[Change]) -> Section | None:
    if not found:
        return None
    moved = [change for change in found if change.judgement not in ("equal", "n/a")]
    rest = [change for change in found if change.judgement in ("equal", "n/a")]
    blocks: list[Block] = [_changes("changes", moved)] if moved else [Paragraph("None differs.")]
    if rest:
        blocks.append(Folded(f"Equal on both sides, or not measured: {len(rest)}", [_changes("equal", rest)]))
    return Section("changes", "Figures before and after", blocks)


def _changes(key: str, found: Sequence[Change]) -> Table:
    body = []
    for change in found:
        metric = change.metric
        extent = change.extent
        body.append(
            [
                change.backend,
                change.world_size,
                Shown(metric.key, metric.title),
                Shown(change.before, figure_text(metric, change.before)),
                Shown(change.after, figure_text(metric, change.after)),
                change.relative,
                extent.low - 1 if extent else None,
                extent.high - 1 if extent else None,
                change.judgement,
            ]
        )
    return Table(key=key, columns=table_columns("before_after"), rows=body)


def _statuses(before: Comparison, after: Comparison) -> Section | None:
    """Cells whose status differs, or that a side lacks."""
    body = []
    for pair in pairs(before, after):
        left = pair.before.status if pair.before else None
        right = pair.after.status if pair.after else None
        if left != right:
            body.append([pair.backend, pair.world_size, left, right])
    if not body:
        return None
    columns = (*LABELS, *(Column(key, key, plain, align="left") for key in ("before", "after")))
    table = Table(key="statuses", columns=columns, rows=body)
    return Section("statuses", "Cells with another status", [table])


def _sides(before: Comparison, after: Comparison) -> Section:
    """The main table, machine and findings of each side, folded."""
    blocks: list[Block] = []
    for name, side in (("Before", before), ("After", after)):
        results = results_table(side.comparable)
        parts: list[Block] = [Heading("Results"), results]
        excluded = not_comparable_table(side)
        if excluded is not None:
            parts += [Heading("Not comparable, and why"), excluded]
        for section in (machine_section(side), findings_section(side)):
            parts += [Heading(section.title), *section.blocks]
        blocks.append(Folded(name, [_of_side(part, name) for part in parts]))
    return Section("sides", "Each side", blocks)


def _of_side(block: Block, side: str) -> Block:
    """The block with its tables with keys that name the side."""
    match block:
        case Table():
            return replace(block, key=f"{block.key}_{side.lower()}")
        case Folded():
            return replace(block, blocks=[_of_side(part, side) for part in block.blocks])
    return block


def _reading(cells: int, *, by_round: bool) -> Section:
    needed = f", which takes {runs_to_judge(cells)} runs on each side" if cells else ""
    counts = listed([metric.title for metric in metrics_in("changes") if metric.is_count])
    text = (
        "Figures are medians over repeats. change: (after - before) / before; least and most: from any run "
        "of one side to any of the other. beyond noise: in an exact permutation test of the runs "
        f"chance makes such a difference in at most {percent(1 - LEVEL)} of cases, for all cells of one "
        f"measure together. {counts} are counts, where any difference is one. "
        "inconclusive: by this test, but the intervals of both sides overlap or sessions do not agree. "
        f"not judged: too few runs to show a difference{needed}. --fail-on passes only changes within the "
        "noise: one that is inconclusive or not judged fails if it is beyond the limit."
    )
    return Section("reading", "How to read the numbers", [Paragraph(text + (BY_ROUND if by_round else ""))])
