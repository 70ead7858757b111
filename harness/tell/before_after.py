"""Reports of the same job before and after a change of versions, machine or options, and over time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from shlex import join
from typing import Any

from harness.judge.changes import (
    Change,
    Condition,
    changes,
    named_cells,
    pairs,
    settings,
    shares_sessions,
    versions,
    versions_of,
)
from harness.judge.comparison import Comparison
from harness.judge.facts import Metric, metrics_in
from harness.judge.rows import CellRuns, reason
from harness.judge.statistics import LEVEL, runs_to_judge
from harness.judge.wording import CellName, a_few, counted, listed
from harness.nested import differences
from harness.record import Record
from harness.record.workload import known_strategy
from harness.tell.document import Block, Column, Document, Folded, Paragraph, Picture, Section, Shown, Table
from harness.tell.first_page import picture_heading
from harness.tell.formats import percent, shortened, signed_percent
from harness.tell.pictures.drawing import Panel, Row, Spec, look_of
from harness.tell.pictures.plots import MOST_NAMED, cell_row
from harness.tell.tables import (
    LABELS,
    blocks_of,
    figure_text,
    prose,
    table,
    table_columns,
    title_text,
)

TITLE = "Comparison with a baseline"
MOST_OPEN = 3
"""Reasons for which runs are compared with none that are named."""
LONG = 120
"""Letters of a reason, of which the record has all."""
NAMED_SHARE = 0.01
"""Of a change within the noise, which a reader sees in a picture."""


def before_after(
    before: Comparison, after: Comparison, folders: Mapping[str, str] | None = None, *last: Section
) -> Document:
    """The report of two comparisons; `folders` holds that of each run, `last` follows the rest."""
    return _over({"before": before, "after": after}, "baseline", TITLE, folders or {}, (), *last)


def verdict(document: Document) -> Iterator[str]:
    """What changed beyond noise and what is said of it, line by line."""
    for block in document.sections[0].blocks:
        if isinstance(block, Paragraph):
            yield block.text
        if isinstance(block, Table):
            for of in block.named(block.rows):
                judged = f" ({of['judged']})" if of.get("judged") else ""
                told = f"{of['measure'].text} of {CellName(of['backend'], of['world_size'])}"
                yield f"Beyond noise, {told} changed by {signed_percent(of['change'])}{judged}."


DOUBTS = {
    "not judged": "; too few runs to tell it from noise",
    "inconclusive": "; beyond noise by the test, but the runs of both sides overlap",
}


def failures(conditions: Sequence[Condition], document: Document) -> list[str]:
    """What fails, in a line each: a condition that is met, and a result that the baseline had and is gone.

    A condition that cannot be checked fails too: silence would look like success.
    """
    lines = [line.removeprefix(LOST) for line in verdict(document) if line.startswith(LOST)]
    tables = [table for table in document.tables() if table.key in ("changes", "equal")]
    found = [row for table in tables for row in table.named(table.rows)]
    other = [CellName(of["backend"], of["world_size"]) for of in found if of["judgement"] == "another job"]
    if conditions:
        lines += [f"{cell}: another job, so nothing is compared" for cell in dict.fromkeys(other)]
    for condition in conditions:
        rows = [of for of in found if of["measure"].value == condition.measure]
        for of in (row for row in rows if row["judgement"] != "another job"):
            key, before, after = condition.measure, of["before"].value, of["after"].value
            where = f"{CellName(of['backend'], of['world_size'])}: {key}"
            if condition.met_by(of["judgement"], of["change"]):
                lines.append(
                    f"{where} changed by {of['change'] * 100:+.1f} %, from {before:g} to {after:g} "
                    f"({condition}){DOUBTS.get(of['judgement'], '')}"
                )
            elif before is not None and after is None:
                lines.append(f"{where} is n/a now, {before:g} before ({condition})")
            elif before == 0 and after and condition.above:
                lines.append(f"{where} was 0, is {after:g} ({condition})")
        if all(of["before"].value is None for of in rows):
            lines.append(f"{condition} could not be checked: no cell of both sides has the measure")
    return lines


def left_out(sides: Mapping[str, Comparison]) -> list[str]:
    """How many runs are another job than the others of their side, and so compared with none, and why."""
    why = [
        f"{row.cell} {name}: {row.judgement.not_same_job[0].differs}"
        for name, side in sides.items()
        for row in side.not_comparable.rows
    ]
    told = listed(list(dict.fromkeys(why)), MOST_OPEN)
    return [prose("before_after_other_job", runs=counted(len(why), "run"), why=told)] if why else []


def _lost(whole: Sequence[Comparison], named: Sequence[Mapping[CellName, CellRuns]]) -> dict[CellName, str]:
    """Cells that the baseline had and the other side has not, or not whole, each with its status there."""
    before, after = named
    odd = {row.cell for row in whole[1].not_comparable.rows}
    found: dict[CellName, str] = {}
    for cell, was in before.items():
        now = after.get(cell)
        if was.cell in odd and was.has_result:
            found[cell] = f"{'in part ' if now else ''}not the job of the others"
        elif now is None and was.has_result:
            found[cell] = "absent"
        elif now and (was.succeeded > now.succeeded or was.has_result > now.has_result):
            found[cell] = now.status
    return found


def settings_section(sides: Mapping[str, Comparison]) -> Section:
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
        Folded(f"Of single backends: {len(own)}", [of_own]) if of_own else None,
    )
    return Section("settings", "Settings that differ", blocks)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _figures(found: Sequence[Change], at: Mapping[str, str], pictures: Sequence[Picture]) -> Section | None:
    """Of two sides, each by its name with what it is called in a sentence."""
    moved = [change for change in found if change.judgement not in UNTOLD]
    rest = [change for change in found if change.judgement in UNTOLD]
    blocks: list[Block] = [*pictures]
    blocks += [_changes("changes", moved, [*at])] if moved else blocks_of("None differs.")
    if rest:
        of_rest = _changes("equal", rest, [*at])
        blocks.append(Folded(f"Equal on both sides, not measured, or of another job: {len(rest)}", [of_rest]))
    return Section("changes", f"Figures {listed([*at.values()])}", blocks) if found else None


def _changes(key: str, found: Sequence[Change], names: Sequence[str]) -> Table:
    titles = dict(zip(("before", "after"), names, strict=True))
    columns = [replace(of, title=titles.get(of.key, of.title)) for of in table_columns("before_after")]
    body = []
    for change in found:
        metric = change.metric
        body.append(
            [
                *change.cell,
                Shown(metric.key, metric.title),
                Shown(change.before, figure_text(metric, change.before)),
                Shown(change.after, figure_text(metric, change.after)),
                change.relative,
                *change.ends,
                change.judgement,
            ]
        )
    return Table(key=key, columns=columns, rows=body)


def _reading(found: Sequence[Change]) -> str:
    cells = len({change.cell for change in found})
    needed = f", which takes {runs_to_judge(cells)} runs on each side" if cells else ""
    counts = listed([metric.title for metric in metrics_in("changes") if metric.is_count])
    text = prose("before_after", counts=counts, needed=needed, chance=percent(1 - LEVEL))
    by_round = any(change.ratio for change in found)
    return f"{text} {prose('before_after_by_round', level=percent(LEVEL))}" if by_round else text


WIDTH, HEIGHT = 460, 240
BEYOND = "beyond noise"
UNTOLD = ("equal", "n/a", "another job")
LOST = "Lost: "


@dataclass(frozen=True, kw_only=True)
class Series:
    """One figure of one cell over the versions, which are numbered from 0."""

    cell: CellName
    metric: Metric
    groups: Mapping[int, CellRuns]
    """Its runs of each version that has the cell: two or more."""
    steps: Mapping[int, Change]
    """Of each of these versions but the first, against the one before it."""
    whole: Change
    """Of the last against the first."""

    def differs(self) -> bool:
        return any(step.judgement not in UNTOLD for step in self.steps.values())

    def text(self, number: int) -> Shown:
        value = self.groups[number].median(self.metric.key) if number in self.groups else None
        return Shown(value, figure_text(self.metric, value))

    def moves(self) -> Iterator[tuple[int, int, Change]]:
        """What changed beyond noise: between which versions; all of them where no single one did."""
        numbers = list(self.groups)
        steps = [(a, b, self.steps[b]) for a, b in pairwise(numbers)]
        ends = (numbers[0], numbers[-1], self.whole)
        for ways in (steps, [ends]):
            found = [way for way in ways if way[2].judgement == BEYOND]
            if found:
                yield from found
                return


def folders_of(records: Mapping[str, Record]) -> dict[str, str]:
    """The folder of each run, of records by their paths from the report."""
    return {record.run_id: str(PurePosixPath(path).parent) for path, record in records.items()}


def over_time(records: Mapping[str, Record], by: str, *last: Section) -> Document:
    """The report over the values of a fact; `records` by their paths from the report.

    Raises HarnessError where the records do not differ in it.
    """
    sides = versions(list(records.values()), by)
    without = sum(by not in versions_of(record) for record in records.values())
    notes = [prose("over_time_left_out", records=counted(without, "record"), by=by)] if without else []
    title = title_text("over_time", by=by, first=next(iter(sides)), last=next(reversed(sides)))
    return _over(sides, by, title, folders_of(records), notes, *last)


def _over(
    whole: Mapping[str, Comparison],
    by: str,
    title: str,
    folders: Mapping[str, str],
    more: Sequence[str],
    *last: Section,
) -> Document:
    """What changed between sides in their order: of two every figure is shown with its judgement."""
    found = {name: side.comparable for name, side in whole.items()}
    names, sides = list(found), list(found.values())
    is_baseline = by == "baseline"
    at = {name: name if is_baseline else f"in {name}" for name in names}
    named = named_cells(*sides)
    compared = _compared(named, sides)
    series = _series(named, compared)
    sound = [one for one in series if one.whole.judgement != "another job"]
    rows = [row for one in series for row in _changed(one, names, folders, is_baseline=is_baseline)]
    two = compared[0, 1] if len(sides) == 2 else []
    jobs = [f"{listed(sorted(side.by_job))} {at[name]}" for name, side in found.items() if side.by_job]
    of_jobs = {job: of.rows[0].record for side in sides for job, of in side.by_job.items()}
    asked = [record.job.model_dump() for record in of_jobs.values()]
    apart = dict.fromkeys(".".join(keys[:2]) for job in asked for keys, *_ in differences(asked[0], job))
    why = a_few([*apart]) or "a file that they name, or the harness, as no setting does"
    lost = _lost(list(whole.values()), named) if is_baseline else {}
    untested = [one for one in sound if one.whole.judgement in ("not judged", "inconclusive")]
    untested.sort(key=lambda one: -abs(one.whole.relative or 0.0))
    shifted = [one for one in series if any(one.moves())]
    moved = {one.metric for one in (*untested, *shifted)}
    same: dict[str, Change] = {}
    for one in sound:
        if one.metric not in moved:
            known = same.setdefault(one.metric.title, one.whole)
            same[one.metric.title] = max(known, one.whole, key=lambda change: abs(change.relative or 0.0))
    steady = [f"{title}{_within_noise(most)}" for title, most in same.items()]
    users = {one.cell for one in series for g in one.groups.values() if by in g.record.backend.versions}
    control = dict.fromkeys(str(one.cell) for one in shifted if users and one.cell not in users)
    once = [
        f"{cell} {at[names[number]]}"
        for number, cells in enumerate(named)
        for cell, group in cells.items()
        if group.has_result and len(_with_result(cell, named)) == 1 and cell not in lost
    ]
    failed = [
        f"{group.cell} {at[name]} ({group.status}: {shortened(reason(group.record) or 'no result', LONG)})"
        for name, side in found.items()
        for group in side.groups
        if not group.succeeded
    ]
    told = blocks_of(
        prose("over_time_jobs", jobs=", ".join(jobs), apart=why) if len(of_jobs) > 1 else "",
        *(f"{LOST}{cell}: {status} after." for cell, status in lost.items()),
        table("changed", rows, "over_time"),
        prose("over_time_failed", cells=listed(failed, len(failed))) if failed else "",
        prose("over_time_control", by=by, cells=listed(list(control))) if control else "",
        *more,
        *left_out({at[name]: side for name, side in whole.items()}),
        prose("over_time_once", cells=listed(once, len(once))) if once else "",
        prose("over_time_same", first=names[0], last=names[-1], figures=listed(steady)) if same else "",
        prose(
            "over_time_untested",
            figures=listed(
                [f"{u.metric.title} of {u.cell} ({signed_percent(u.whole.relative)})" for u in untested],
                MOST_NAMED,
            ),
        )
        if untested
        else "",
        prose("before_after_other_sessions") if two and not shares_sessions(*sides) else "",
    )
    pictures = [] if is_baseline else _pictures(series, names, by)
    figures = _figures(two, at, pictures) if len(sides) == 2 else _over_versions(series, names, pictures)
    reading = _reading(two) if len(sides) == 2 else prose("over_time")
    sections = [
        Section("verdict", "Verdict", told),
        *([settings_section(found), figures] if is_baseline else [figures, settings_section(found)]),
        Section("reading", "How to read the numbers", blocks_of(reading)),
        *last,
    ]
    return Document(title, [one for one in sections if one], heading=picture_heading(sides[-1]))


def _pictures(series: Sequence[Series], names: Sequence[str], by: str) -> list[Picture]:
    one_job = [one for one in series if len({group.record.job_id for group in one.groups.values()}) == 1]
    by_metric = [list(of) for _, of in groupby(one_job, key=lambda one: one.metric.key)]
    return [_picture(of, names, by) for of in by_metric if any(map(Series.differs, of))]


def _over_versions(series: Sequence[Series], names: Sequence[str], pictures: Sequence[Picture]) -> Section:
    columns = [*LABELS, Column("measure", "measure", align="left"), *(Column(name, name) for name in names)]
    values = [
        [*one.cell, Shown(one.metric.key, one.metric.title), *map(one.text, range(len(names)))]
        for one in series
    ]
    shown = blocks_of(*pictures, table("values", values, columns))
    return Section("over_time", "Figures over versions", shown)


def _within_noise(change: Change) -> str:
    """What a reader sees in a picture of a figure that did not change, and how far its runs scatter."""
    if change.extent is None or abs(change.relative or 0.0) < NAMED_SHARE:
        return ""
    low, high = map(signed_percent, change.ends)
    return f" ({signed_percent(change.relative)} at most, any two runs {low} to {high})"


def _several(named: Sequence[Mapping[CellName, CellRuns]]) -> dict[CellName, dict[int, CellRuns]]:
    """Cells of which two versions or more have a result."""
    cells = dict.fromkeys(cell for cells in named for cell in cells)
    return {cell: of for cell in cells if len(of := _with_result(cell, named)) > 1}


def _compared(
    named: Sequence[Mapping[CellName, CellRuns]], sides: Sequence[Comparison]
) -> dict[tuple[int, int], list[Change]]:
    """Every two sides that are shown against each other."""
    wanted = {two for of in _several(named).values() for two in (*pairwise(of), (min(of), max(of)))}
    wanted |= {(0, 1)} if len(sides) == 2 else set()
    return {
        (first, second): changes(sides[first], sides[second], pairs(named[first], named[second]), len(wanted))
        for first, second in wanted
    }


def _series(
    named: Sequence[Mapping[CellName, CellRuns]], found: Mapping[tuple[int, int], Sequence[Change]]
) -> list[Series]:
    """Series of every figure of every cell that two versions or more have, figure by figure."""
    several = _several(named)
    compared = {two: {(c.cell, c.key): c for c in of} for two, of in found.items()}
    return [
        Series(
            cell=cell, metric=metric, groups=of,
            steps={b: compared[a, b][cell, metric.key] for a, b in pairwise(of)},
            whole=whole,
        )
        for metric in metrics_in("changes")
        if metric.follows is None
        for cell, of in several.items()
        if (whole := compared[min(of), max(of)][cell, metric.key]).judgement != "n/a"
    ]  # fmt: skip


def _with_result(cell: CellName, named: Sequence[Mapping[CellName, CellRuns]]) -> dict[int, CellRuns]:
    """A cell's runs of each version that has a result of it."""
    return {n: cells[cell] for n, cells in enumerate(named) if cell in cells and cells[cell].has_result}


def _changed(
    one: Series, names: Sequence[str], folders: Mapping[str, str], *, is_baseline: bool
) -> Iterator[list[object]]:
    """Rows of `over_time`, with the command that shows both runs; of a baseline with what got worse."""
    for before, after, change in one.moves():
        if one.text(before).text == one.text(after).text:
            continue  # a few bytes of many
        runs = [folders.get(run := one.groups[number].record.run_id, run) for number in (before, after)]
        command = f"harness diagnose {join(runs)}"
        way: tuple[str | None, ...] = (names[before], names[after], None)
        if is_baseline:
            way = (None, None, {None: None, True: "worse", False: "better"}[change.is_worse])
        yield [
            *one.cell, Shown(one.metric.key, one.metric.title), *way,
            one.text(before), one.text(after), change.relative, *change.ends, command,
        ]  # fmt: skip


def _picture(series: Sequence[Series], names: Sequence[str], by: str) -> Picture:
    """One figure of every cell over the versions."""
    metric = series[0].metric
    ends = [f"{one.cell} {signed_percent(one.whole.relative)}" for one in series]
    return Picture(
        key=f"over-{metric.key.replace('_', '-')}", caption=prose("over_time_picture", figure=metric.title),
        alt=f"{metric.title} over {by}, {names[0]} to {names[-1]}: {listed(ends, MOST_NAMED)}.",
        chart=lambda: _chart(series, names, by),
    )  # fmt: skip


def _chart(series: Sequence[Series], names: Sequence[str], by: str) -> Spec:
    """Each cell over its first version, in percent, so that cells of all sizes share one axis."""
    every = [one.groups[max(one.groups)] for one in series]
    rows: list[Row] = []
    for index, (one, group) in enumerate(zip(series, every, strict=True)):
        base = one.groups[min(one.groups)].median(one.metric.key)
        for number, of in one.groups.items():
            value = of.median(one.metric.key)
            if not base or value is None:
                continue
            label = f"{one.cell} {one.text(number).text}" if of is group else None
            row = cell_row(group, every, curve=index, x=number + 1, value=100 * value / base, label=label)
            rows.append(row | look_of(known_strategy(group.record)))
    shares = [row["value"] for row in rows] or [100.0]
    panel = Panel(
        across=by, up=f"{series[0].metric.title}, % of {names[0]}", domain=(0, 1.08 * max(shares)),
        is_log=False, width=WIDTH, height=HEIGHT, places=tuple(names),
    )  # fmt: skip
    return panel.chart(rows, range(1, len(names) + 1))
