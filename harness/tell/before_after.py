"""The report of the same job before and after a change of versions, machine or options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from harness.judge.changes import Change, changes, pairs, settings, shares_sessions
from harness.judge.comparison import Comparison
from harness.judge.facts import metrics_in
from harness.judge.statistics import LEVEL, runs_to_judge
from harness.judge.wording import CellName, counted, listed
from harness.tell import document
from harness.tell.formats import percent, signed_percent
from harness.tell.tables import (
    LABELS,
    blocks_of,
    figure_text,
    prose,
    section,
    table,
    table_columns,
)

TITLE = "Comparison with a baseline"
MISSING = "not comparable, or absent"
MOST_OPEN = 3
"""Untested figures that the verdict names."""


def before_after(before: Comparison, after: Comparison, *last: document.Section) -> document.Document:
    """The report of two comparisons; `last` follows what is computed from them alone."""
    left, right = before.comparable, after.comparable
    found = changes(left, right)
    sections = [
        _verdict(before, after, found),
        settings_section({"before": left, "after": right}),
        _figures(found),
        _statuses(before, after),
        _reading(_on_both_sides(left, right), by_round=any(change.ratio for change in found)),
        *last,
    ]
    return document.Document(TITLE, [section for section in sections if section is not None])


def _verdict(whole: Comparison, whole_after: Comparison, found: Sequence[Change]) -> document.Section:
    before, after = whole.comparable, whole_after.comparable
    left, right = set(before.by_job), set(after.by_job)
    if left == right and len(left) == 1:
        sentences = [f"Both sides ran job {left.pop()}."]
    else:
        jobs = {"before": listed(sorted(left)), "after": listed(sorted(right))}
        sentences = [prose("before_after_other_jobs", **jobs)]
    both = _on_both_sides(before, after)
    if both and not shares_sessions(before, after):
        sentences.append(prose("before_after_other_sessions"))
    sentences.append(f"{both} cells (backend and number of ranks) are on both sides.")
    sentences += _lost_and_new(before, after)
    sentences += left_out({"before": whole, "after": whole_after})
    moved = [c for c in found if c.judgement == "beyond noise"]
    for metric in metrics_in("changes"):
        lines = [
            _of_cell(change) + {None: "", True: " (worse)", False: " (better)"}[change.is_worse]
            for change in moved
            if change.metric is metric and metric.follows is None
        ]
        if lines:
            sentences.append(f"Beyond noise, {metric.title} changed for {listed(lines)}.")
    open_ = sorted((c for c in found if c.judgement == "not judged"), key=lambda c: -abs(c.relative or 0.0))
    if not moved and found and not open_:
        sentences.append("No figure of these cells changed beyond noise.")
    if open_:
        largest = listed([f"{c.metric.title} of {_of_cell(c)}" for c in open_[:MOST_OPEN]])
        counts = {"open": len(open_), "all": len(found), "runs": runs_to_judge(both)}
        sentences.append(prose("before_after_untested", largest=largest, **counts))
    return document.Section("verdict", "Verdict", [document.Items(sentences)])


def _of_cell(change: Change) -> str:
    """'ddp on 2 by +5.0 %'."""
    return f"{change.backend} on {change.world_size} by {signed_percent(change.relative)}"


def _on_both_sides(before: Comparison, after: Comparison) -> int:
    return sum(pair.before is not None and pair.after is not None for pair in pairs(before, after))


def _lost_and_new(before: Comparison, after: Comparison) -> list[str]:
    found: dict[str, list[str]] = {
        "Lost, with their status after": [], "New, with their status before": []
    }  # fmt: skip
    lost, new = found.values()
    for pair in pairs(before, after):
        well = [side is not None and side.succeeded for side in (pair.before, pair.after)]
        other = pair.after if well[0] else pair.before
        text = f"{CellName(pair.backend, pair.world_size)} ({other.status if other else MISSING})"
        if well[0] != well[1]:
            (lost if well[0] else new).append(text)
    return [f"{what}: {listed(cells)}." for what, cells in found.items() if cells]


def left_out(sides: Mapping[str, Comparison]) -> list[str]:
    """How many runs are another job than the others of their side, and so compared with none, and why."""
    why = [
        f"{row.cell} {name}: {row.judgement.not_same_job[0].differs}"
        for name, side in sides.items()
        for row in side.not_comparable.rows
    ]
    told = listed(list(dict.fromkeys(why)), MOST_OPEN)
    return [prose("before_after_other_job", runs=counted(len(why), "run"), why=told)] if why else []


def settings_section(sides: Mapping[str, Comparison]) -> document.Section:
    """What differs from each side to the next."""
    found = [
        (f"{one} to {other}" if len(sides) > 2 else None, setting)
        for (one, before), (other, after) in pairwise(sides.items())
        for setting in settings(before, after)
    ]
    rows = [[step, s.backend or "all", s.field, _text(s.before), _text(s.after)] for step, s in found]
    own = [row for row in rows if row[1] != "all"]
    columns = "before_after_settings"
    of_own = table("own_settings", own, columns)
    blocks = blocks_of(
        "" if found else "None in the records.",
        table("settings", [row for row in rows if row[1] == "all"], columns),
        document.Folded(f"Of single backends: {len(own)}", [of_own]) if of_own else None,
    )
    return document.Section("settings", "Settings that differ", blocks)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _figures(found: Sequence[Change]) -> document.Section | None:
    moved = [change for change in found if change.judgement not in ("equal", "n/a")]
    rest = [change for change in found if change.judgement in ("equal", "n/a")]
    blocks: list[document.Block] = [_changes("changes", moved)] if moved else blocks_of("None differs.")
    if rest:
        blocks.append(
            document.Folded(f"Equal on both sides, or not measured: {len(rest)}", [_changes("equal", rest)])
        )
    return document.Section("changes", "Figures before and after", blocks) if found else None


def _changes(key: str, found: Sequence[Change]) -> document.Table:
    body = []
    for change in found:
        metric = change.metric
        extent = change.extent
        body.append(
            [
                change.backend,
                change.world_size,
                document.Shown(metric.key, metric.title),
                document.Shown(change.before, figure_text(metric, change.before)),
                document.Shown(change.after, figure_text(metric, change.after)),
                change.relative,
                extent.low - 1 if extent else None,
                extent.high - 1 if extent else None,
                change.judgement,
            ]
        )
    return document.Table(key=key, columns=table_columns("before_after"), rows=body)


def _statuses(before: Comparison, after: Comparison) -> document.Section | None:
    """Cells whose status differs, or that a side lacks."""
    body = []
    for pair in pairs(before, after):
        left = pair.before.status if pair.before else None
        right = pair.after.status if pair.after else None
        if left != right:
            body.append([pair.backend, pair.world_size, left, right])
    columns = (*LABELS, *(document.Column(key, key, align="left") for key in ("before", "after")))
    return section("statuses", "Cells with another status", table("statuses", body, columns))


def _reading(cells: int, *, by_round: bool) -> document.Section:
    needed = f", which takes {runs_to_judge(cells)} runs on each side" if cells else ""
    counts = listed([metric.title for metric in metrics_in("changes") if metric.is_count])
    noise = {"counts": counts, "needed": needed, "chance": percent(1 - LEVEL)}
    texts = [prose("before_after", **noise)]
    texts += [prose("before_after_by_round", level=percent(LEVEL))] if by_round else []
    return document.Section("reading", "How to read the numbers", blocks_of(" ".join(texts)))
