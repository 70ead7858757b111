"""The same job before and after: what was configured otherwise, and which figures moved beyond noise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, Literal, NamedTuple

from packaging.version import InvalidVersion, Version

from harness.backends.refusals import available
from harness.errors import HarnessError
from harness.judge.comparison import Comparison
from harness.judge.facts import Metric, metrics_in
from harness.judge.quantities import Run
from harness.judge.rows import CellRuns, JudgedRun
from harness.judge.run_conditions import BySession, began_at, facts, labelled, sessions, varying, words
from harness.judge.statistics import (
    LEVEL,
    Interval,
    Logs,
    Ratio,
    Round,
    Stratum,
    interval_runs,
    log_ratios,
    made_in_one_go,
    ratios,
    shown_interval,
    stratified_significance,
    value_range,
)
from harness.judge.wording import CellName
from harness.nested import grouped, leaves
from harness.record import Record

OF_ONE_RUN = ("SLURM_JOB_ID",)
"""Variables that are never the same in two runs."""
LASTING = {"python", "platform", "cpu", "cores", "memory_bytes", "gpus", "packages", "code"}
"""What stays the same from run to run on one machine."""
Judgement = Literal[
    "beyond noise", "within noise", "inconclusive", "not judged", "equal", "n/a", "another job"
]
"""'inconclusive': the test finds a difference, but the intervals of both sides overlap, or not every session
that they share orders them alike."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure of one cell on both sides, medians over repeats."""

    cell: CellName
    metric: Metric
    before: float | None
    after: float | None
    extent: Interval | None
    """Of after / before: of any run of one side and any of the other or, by rounds, that of `ratio`."""
    judgement: Judgement
    ratio: Ratio | None = None
    """Of after / before in the same rounds; None: too few rounds hold a run of each side."""

    @property
    def key(self) -> str:
        return self.metric.key

    @property
    def relative(self) -> float | None:
        """(after - before) / before, or `ratio` less 1; None: another job, one is missing, before is 0."""
        if self.judgement == "another job":
            return None
        if self.ratio is not None and self.ratio.middle is not None:
            return self.ratio.middle - 1
        if self.before is None or self.after is None or not self.before:
            return None
        return self.after / self.before - 1

    @property
    def ends(self) -> tuple[float, float] | tuple[None, None]:
        """`extent` as changes."""
        return (self.extent.low - 1, self.extent.high - 1) if self.extent else (None, None)

    @property
    def is_worse(self) -> bool | None:
        """Whether the figure moved away from what is better; None: neither direction is, or it is unknown."""
        if self.relative is None or self.metric.better is None:
            return None
        return (self.relative < 0) == (self.metric.better == "higher")


@dataclass(frozen=True, kw_only=True)
class ChangedSetting:
    """A setting that differs between the sides."""

    backend: str
    """Empty: of job, machine or versions, which all cells share."""
    field: str
    before: Any
    after: Any


class Pair(NamedTuple):
    """One backend and world size that both sides have."""

    cell: CellName
    before: CellRuns
    after: CellRuns

    @property
    def is_one_job(self) -> bool:
        """Whether a difference is a change.

        An id covers every setting that a version knows: of another version the same job has another one. Then
        settings, as read today, initial weights and the samples of all steps tell.
        """
        one, other = self.before.record, self.after.record
        if one.job_id == other.job_id or one.observation or other.observation:
            return one.job_id == other.job_id
        begun, its = (
            [run.initial_weights and run.initial_weights.digest, *(step.sample_hashes for step in run.steps)]
            for run in (one, other)
        )
        is_of_another_version = one.environment.code != other.environment.code
        return (
            is_of_another_version and begun == its and all(begun) and one.job.job_id() == other.job.job_id()
        )


def versions(records: Sequence[Record], by: str) -> dict[str, Comparison]:
    """The runs of each value of a fact: of packages in the order of versions, else of time.

    by: 'commit', 'date', or a fact of `run_conditions.facts`, such as 'torch'; records without are left out.
    Raises HarnessError where the records do not differ in it.
    """
    dates = sorted(records, key=lambda record: began_at(record) or 0.0)
    known = [versions_of(record) for record in dates]
    if len({of["date"] for of in known}) == 1:  # of one day its sessions
        begun: dict[int, str] = {}
        for of, record, number in zip(known, dates, sessions(dates), strict=True):
            of["date"] = begun.setdefault(number, _began(record)[:16].replace("T", " "))
    differ = [
        name for name in dict.fromkeys(chain(*known)) if len({of.get(name) for of in known} - {None}) > 1
    ]
    if by not in differ:
        raise HarnessError(
            f"--over was given '{by}', which does not differ between these records. {available(by, differ)}"
        )
    found = grouped((of[by], record) for record, of in zip(dates, known, strict=True) if by in of)
    with suppress(InvalidVersion):  # else they stay in the order of time
        found = dict(sorted(found.items(), key=lambda item: Version(item[0])))
    return {name: Comparison(of) for name, of in found.items()}


def _began(record: Record) -> str:
    return record.environment.started_at or record.created_at


def versions_of(record: Record) -> dict[str, str]:
    git = record.environment.git
    own = {"commit": git.commit[:12] + ("*" if git.modified else "")} if git else {}
    return (
        own
        | {"date": _began(record)[:10]}
        | {name: text.removeprefix(f"{name} ") for name, text in facts(record).items()}
    )


def named_cells(*sides: Comparison) -> list[dict[CellName, CellRuns]]:
    """Cells of each side by backend and world size, with what differs within any side.

    Not with what only the sides differ in.
    """
    sizes = {group.world_size for side in sides for group in side.groups}
    names = {
        size: dict.fromkeys(
            name for side in sides for name in varying(g.record for g in side.groups if g.world_size == size)
        )
        for size in sizes
    }
    return [
        {
            CellName(labelled(g.backend, words(g.record, [*names[g.world_size]])), g.world_size): g
            for g in side.groups
        }
        for side in sides
    ]


def pairs(before: Mapping[CellName, CellRuns], after: Mapping[CellName, CellRuns]) -> list[Pair]:
    """Of named cells those that both sides have, in the order of the baseline."""
    return [Pair(cell, group, after[cell]) for cell, group in before.items() if cell in after]


def changes(
    before: Comparison, after: Comparison, cells: Sequence[Pair] | None = None, pairs_tested: int = 1
) -> list[Change]:
    """cells: what is compared; None: all that both have. pairs_tested: of sides that are shown together."""
    both = pairs(*named_cells(before, after)) if cells is None else cells
    numbers = joint_sessions(before, after)
    rounds = [_common_rounds(pair, numbers) if pair.is_one_job else {} for pair in both]
    tests = pairs_tested * sum(pair.is_one_job for pair in both)
    measured = {metric.key: _by_round(rounds, metric) for metric in metrics_in("changes") if metric.is_timed}
    return [
        _change(pair, metric, tests, numbers, measured.get(metric.key, {}).get(place))
        for place, pair in enumerate(both)
        for metric in metrics_in("changes")
    ]


def _common_rounds(pair: Pair, numbers: Mapping[Run, int]) -> dict[Round, tuple[JudgedRun, JudgedRun]]:
    """The runs of both sides that were made in turns: between two of a round lies no other round's.

    A side that ran as a whole before the other has numbers of repeats in common with it, and one round.
    """
    sides: list[dict[Round, JudgedRun]] = [
        {(numbers[row.run], row.record.repeat): row for row in side.rows}
        for side in (pair.before, pair.after)
    ]
    both = {number: (row, sides[1][number]) for number, row in sides[0].items() if number in sides[1]}
    began = {
        number: (one, other)
        for number, (left, right) in both.items()
        if (left.record.turns is None) == (right.record.turns is None)
        and None not in (one := began_at(left.record), other := began_at(right.record))
        and one != other
    }
    return {number: both[number] for number in made_in_one_go(began)}


def _by_round(
    rounds: Sequence[Mapping[Round, tuple[JudgedRun, JudgedRun]]], metric: Metric
) -> dict[int, Ratio]:
    """After / before of those cells that ran in rounds enough, by place; all are tested together."""
    asked: dict[int, Logs] = {}
    for place, of_cell in enumerate(rounds):
        both: dict[Round, tuple[float, float]] = {}
        for number, rows in of_cell.items():
            old, new = (row.figures[metric.key] for row in rows)
            if old is not None and new is not None:
                both[number] = metric.clock([new])[0], metric.clock([old])[0]
        if len(both) >= interval_runs():
            asked[place] = log_ratios(both)
    speeds = ratios(asked)
    return speeds if metric.better == "higher" else {place: of.mirrored for place, of in speeds.items()}


def joint_sessions(before: Comparison, after: Comparison) -> dict[Run, int]:
    """The session of each run of both sides, in one numbering."""
    runs = [row.run for side in (before, after) for row in side.rows]
    return dict(zip(runs, sessions([run.record for run in runs]), strict=True))


def shares_sessions(before: Comparison, after: Comparison) -> bool:
    """Whether runs of both sides were made in one session, so that a day is not taken for the change."""
    numbers = joint_sessions(before, after)
    left, right = ({numbers[row.run] for row in side.rows} for side in (before, after))
    return not left.isdisjoint(right)


def settings(before: Comparison, after: Comparison) -> list[ChangedSetting]:
    """What differs in job, machine and versions, and in what was in force for each backend.

    All runs of a side count: a field that has several values there has a list of them.
    """
    if not before.rows or not after.rows:
        return []
    left, right = ([_shared(row.record) for row in side.rows] for side in (before, after))
    shared = _differences(left, right, "")
    for cell, one, other in pairs(*named_cells(before, after)):
        shared += _differences(_own(one), _own(other), f"{cell.label}, {cell.world_size}")
    return shared


def _change(
    pair: Pair, metric: Metric, cells: int, numbers: Mapping[Run, int], ratio: Ratio | None
) -> Change:
    left, right = pair.before.values(metric.key), pair.after.values(metric.key)
    extent: Interval | None = None
    judgement: Judgement = "another job"
    if pair.is_one_job and ratio is None:
        above, below = value_range(right), value_range(left)
        if above is not None and below is not None and below.low > 0:
            extent = Interval(above.low / below.high, above.high / below.low)
        judgement = _judge(pair.before, pair.after, metric, cells, numbers)
    elif ratio is not None:
        extent, judgement = ratio.extent, "within noise"
        if ratio.is_shown or ratio.chance <= 1 - LEVEL:
            judgement = "beyond noise" if ratio.is_shown else "inconclusive"
    return Change(
        cell=pair.cell, metric=metric,
        before=pair.before.median(metric.key), after=pair.after.median(metric.key),
        extent=extent, judgement=judgement, ratio=ratio,
    )  # fmt: skip


def _judge(
    before: CellRuns, after: CellRuns, metric: Metric, cells: int, numbers: Mapping[Run, int]
) -> Judgement:
    """Within the sessions that both sides share or, where they share none, as if there was one."""
    sessions_of: list[dict[int, list[float]]] = []
    for side in (before, after):
        found: dict[int, list[float]] = {}
        for row in side.rows:
            if (value := row.figures[metric.key]) is not None:
                found.setdefault(numbers[row.run], []).extend(metric.clock([value]))
        sessions_of.append(found)
    left, right = sessions_of
    if not left or not right:
        return "n/a"
    if before.median(metric.key) == after.median(metric.key):
        return "equal"
    if metric.is_count:
        return "beyond noise"
    limits = [side.limits for side in (before, after) if side.limits and side.parity != "unjudged"]
    if metric.limit and len(limits) == 2:
        allowed = max(getattr(one, metric.limit) for one in limits)
        values = [list(chain.from_iterable(side.values())) for side in (left, right)]
        if abs(median(values[1]) - median(values[0])) <= allowed:
            return "within noise"
        if all(max(of) - min(of) <= allowed for of in values):
            return "beyond noise"
    in_turns = [{row.record.turns is not None for row in side.rows} for side in (before, after)]
    if metric.is_timed and in_turns[0].isdisjoint(in_turns[1]):
        return "inconclusive"  # caches are colder in turns
    if left.keys().isdisjoint(right):
        left, right = ({0: list(chain.from_iterable(side.values()))} for side in (left, right))
    strata = _strata(right, left)
    tested = stratified_significance(strata, cells)
    return "inconclusive" if tested == "beyond noise" and _is_contradicted(strata, right, left) else tested


def _is_contradicted(strata: Sequence[Stratum], values: BySession, base: BySession) -> bool:
    """Whether a shared session, or the medians over all runs, order both sides otherwise than another.

    On a single session also where their intervals overlap.
    """
    overall = [median(chain.from_iterable(side.values())) for side in (values, base)]
    rises = {median(left) > median(right) for left, right in strata} | {overall[0] > overall[1]}
    one, other = map(shown_interval, strata[0])
    apart = one is not None and other is not None and (one.low > other.high or other.low > one.high)
    return len(rises) > 1 or (len(strata) == 1 and not apart)


def _strata(values: BySession, base: BySession) -> list[Stratum]:
    both = sorted(session for session in values if values[session] and base.get(session))
    return [(values[session], base[session]) for session in both]


def _shared(record: Record) -> dict[str, Any]:
    environment = record.environment
    variables = {k: v for k, v in environment.variables.items() if k not in OF_ONE_RUN}
    return {
        "job": record.job.model_dump(mode="json"),
        "environment": environment.model_dump(include=LASTING) | {"variables": variables},
        "measure": record.measure.model_dump() if record.measure else None,
        "commit": environment.git.commit if environment.git else None,
    }


def _own(repeats: CellRuns) -> list[dict[str, Any]]:
    """Configurations of the runs that came as far as to have one."""
    return [
        {
            "effective": row.record.backend.in_force(),
            "native_config": row.record.backend.native_config,
            "world": row.record.world.model_dump(),
            "turns": row.record.turns.steps if row.record.turns else None,
        }
        for row in repeats.rows
        if row.record.backend.effective is not None
    ]


def _differences(before: Sequence[Any], after: Sequence[Any], backend: str) -> list[ChangedSetting]:
    """Leaves whose values over the documents of a side are not those of the other's; none of no documents."""
    if not before or not after:
        return []
    left, right = (
        [{".".join(keys): value for keys, value in leaves(document)} for document in side]
        for side in (before, after)
    )
    found = []
    for field in dict.fromkeys(field for values in (*left, *right) for field in values):
        old, new = _values(left, field), _values(right, field)
        if any(value not in new for value in old) or any(value not in old for value in new):
            found.append(ChangedSetting(backend=backend, field=field, before=_one(old), after=_one(new)))
    return found


def _values(documents: Sequence[dict[str, Any]], field: str) -> list[Any]:
    """Each value of a field once, in the order of the documents."""
    values: list[Any] = []
    for document in documents:
        if document.get(field) not in values:
            values.append(document.get(field))
    return values


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


EXAMPLE = "peak_bytes>+5%,tokens_per_second<-3%"
_CONDITION = re.compile(r"\s*(\w+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class Condition:
    """Fails where a measure rises above, or falls below, so much relative to the baseline."""

    measure: str
    above: bool
    relative: float

    def __str__(self) -> str:
        return f"{self.measure}{'>' if self.above else '<'}{self.relative * 100:+g}%"

    def met_by(self, judgement: Judgement, change: float | None) -> bool:
        """Whether a change is beyond the limit; one within the noise is not, one not judged may be."""
        if judgement in ("within noise", "equal") or change is None:
            return False
        return change > self.relative if self.above else change < self.relative


def parse_conditions(text: str) -> list[Condition]:
    """Read comma-separated conditions. Raises HarnessError for what is none."""
    found = []
    for piece in text.split(","):
        match = _CONDITION.fullmatch(piece)
        if match is None:
            raise HarnessError(
                f"--fail-on was given '{piece.strip()}'; a condition is a measure, < or >, and percent of "
                f"change with its sign, as in {EXAMPLE}"
            )
        measure, sign, percent = match.groups()
        known = [metric.key for metric in metrics_in("changes")]
        if measure not in known:
            raise HarnessError(f"--fail-on: measure '{measure}' is unknown. {available(measure, known)}")
        limit = float(percent) / 100
        if (sign == ">" and limit < 0) or (sign == "<" and limit > 0):
            raise HarnessError(
                f"--fail-on was given '{piece.strip()}', which no change can meet; write > with a "
                f"rise and < with a fall, as in {EXAMPLE}"
            )
        found.append(Condition(measure=measure, above=sign == ">", relative=limit))
    return found
