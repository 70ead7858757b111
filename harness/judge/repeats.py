"""The repeats of one job, backend and world size, summed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.backends.registry import REFERENCE
from harness.judge.agreement.noise import TIGHT, Noise, Tolerance
from harness.judge.agreement.parity import Parity
from harness.judge.cell import CellName
from harness.judge.distance import aligned
from harness.judge.metrics import BY_KEY, METRICS, SPEED, STEP, Metric
from harness.judge.ranking import InTurns, Logs, Ranking, Round
from harness.judge.rows import JudgedRun
from harness.judge.run import Run
from harness.judge.run_conditions import Spread, began_at, is_deterministic, spread
from harness.judge.speed import shares_cores
from harness.record import Record

# Worst first: a row of repeats is as good as its worst one.
LEVELS: tuple[Parity, ...] = ("diverged", "unjudged", "band", "tight", "exact")
RepeatsKey = tuple[str, str, int]
Place = tuple[str, int, str]


@dataclass(frozen=True)
class CellRuns:
    """Runs of one job, backend and world size, in the order of the records."""

    rows: Sequence[JudgedRun]

    @cached_property
    def counted(self) -> Sequence[JudgedRun]:
        """Those that its figures are made of: without runs that came to no result, where others did."""
        return [row for row in self.rows if row.record.status == "ok"] if self.has_result else self.rows

    @property
    def record(self) -> Record:
        """The first repeat with a result, for what all repeats share."""
        return self.counted[0].record

    @cached_property
    def runs(self) -> list[Run]:
        """The run of each row that counts."""
        return [row.run for row in self.counted]

    @property
    def label(self) -> str:
        """The backend with its options, and in brackets how its runs differ from others of it."""
        return self.rows[0].label

    @property
    def backend(self) -> str:
        """The backend with its options, without the brackets."""
        return self.rows[0].backend

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.record.world.world_size

    @property
    def key(self) -> RepeatsKey:
        """Job, backend and number of ranks."""
        return self.record.job_id, self.label, self.world_size

    @property
    def place(self) -> Place:
        """Job, number of ranks and run conditions: only runs that share them are compared."""
        return self.record.job_id, self.world_size, self.rows[0].label_suffix

    @property
    def cell(self) -> CellName:
        """The label and the number of ranks."""
        return self.rows[0].cell

    @property
    def is_reference(self) -> bool:
        """Whether the others are compared with it."""
        return self.record.backend.name == REFERENCE

    @property
    def status(self) -> str:
        """The status that repeats share, or each with its count."""
        statuses = [row.record.status for row in self.rows]
        kinds = list(dict.fromkeys(statuses))
        return kinds[0] if len(kinds) == 1 else ", ".join(f"{k} x{statuses.count(k)}" for k in kinds)

    @property
    def succeeded(self) -> bool:
        """Whether every repeat succeeded."""
        return all(row.record.status == "ok" for row in self.rows)

    @cached_property
    def has_result(self) -> bool:
        """Whether a repeat succeeded and no other lost its loss or norm; others may have failed."""
        statuses = {row.record.status for row in self.rows}
        return "ok" in statuses and "diverged" not in statuses

    @property
    def parity(self) -> Parity:
        """That of the worst repeat that counts."""
        return min((row.judgement.parity for row in self.counted), key=LEVELS.index)

    @cached_property
    def _judged_by(self) -> tuple[Noise, str] | None:
        """The noise of its job and the level that its runs were last held to; None: they are not judged."""
        row = next((row for row in self.rows if row.noise is not None), None)
        if row is None or row.noise is None:
            return None
        return row.noise, row.noise.widest_level(row.record) if self.parity in ("band", "diverged") else TIGHT

    @property
    def limits(self) -> Tolerance | None:
        """What the level allows that its runs were last held to; None: they are not judged."""
        return self._judged_by[0].of_level(self._judged_by[1]) if self._judged_by else None

    @property
    def assumed(self) -> str:
        """'3 roundings of bf16': what these limits are where no run measured them, else ''."""
        return self._judged_by[0].assumed(self._judged_by[1]) if self._judged_by else ""

    @property
    def timed_steps(self) -> list[list[float]]:
        """Seconds of the timed steps of each repeat."""
        return [run.step_seconds for run in self.runs]

    @cached_property
    def step_seconds(self) -> list[float]:
        """Every timed step of every repeat."""
        return [seconds for steps in self.timed_steps for seconds in steps]

    @cached_property
    def rank_peaks(self) -> list[int]:
        """Peak bytes of every rank of every repeat."""
        return [peak for run in self.runs for peak in run.rank_peaks]

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """Every metric of the cell, by its key."""
        pools = {metric: self.pool(metric) for metric in METRICS}
        return {metric.key: metric.aggregate(pool) if pool else None for metric, pool in pools.items()}

    def pool(self, metric: Metric) -> list[float]:
        """The values that a figure of the cell is made of."""
        if metric.pool is None:
            return self.values(metric.key)
        return [value for run in self.runs for value in metric.pool(run)]

    def values(self, key: str) -> list[float]:
        """One figure per repeat, those that have none left out."""
        return [value for row in self.counted if (value := row.figures[key]) is not None]

    def by_round(self, key: str) -> dict[Round, float]:
        """The figure of each repeat by its round, of rates the seconds per unit: what is compared."""
        return {number: BY_KEY[key].clock([value])[0] for number, (value, _) in self._rounds(key).items()}

    def in_turns(self, key: str) -> dict[Round, InTurns]:
        """The rounds that have this figure and in which the cell took turns."""
        return {
            number: InTurns(run_id=run.record.run_id, beside=turns.beside)
            for number, (_, run) in self._rounds(key).items()
            if (turns := run.record.turns) is not None
        }

    def began(self, key: str) -> dict[Round, float]:
        """When the run of each round that has this figure began, where that is known."""
        times = {number: began_at(run.record) for number, (_, run) in self._rounds(key).items()}
        return {number: time for number, time in times.items() if time is not None}

    def log_ratios(self, base: CellRuns, key: str) -> Logs:
        """The logarithm of the ratio of two speeds in each round that both have."""
        ours, theirs = "ours", "theirs"  # their labels may be the same
        return _ranking({ours: self, theirs: base}, theirs, key).by_round(ours, theirs)

    def _rounds(self, key: str) -> dict[Round, tuple[float, Run]]:
        found: dict[Round, tuple[float, Run]] = {}
        for row in self.counted:
            if (value := row.figures[key]) is not None:
                number = row.run.session, row.record.repeat
                nth = sum(known[:2] == number for known in found)
                found[*number, nth] = value, row.run
        return found

    @cached_property
    def spread(self) -> Spread:
        """How far the mean timed steps of the repeats lie apart, within and between sessions."""
        found: dict[int, list[float]] = {}
        for (session, *_), seconds in self.by_round(STEP).items():
            found.setdefault(session, []).append(seconds)
        return spread(found)

    def median(self, key: str) -> float | None:
        """Median over the repeats."""
        values = self.values(key)
        return BY_KEY[key].middle(values) if values else None


def group_repeats(rows: Sequence[JudgedRun]) -> list[CellRuns]:
    """Rows of one job, label and world size together, in their first order.

    Runs that the user ended are left out where others of the cell succeeded: nothing failed.
    """
    groups: dict[RepeatsKey, list[JudgedRun]] = {}
    for row in rows:
        record = row.record
        groups.setdefault((record.job_id, row.label, record.world.world_size), []).append(row)
    return [CellRuns(_without_interrupted(group)) for group in groups.values()]


def _without_interrupted(rows: list[JudgedRun]) -> list[JudgedRun]:
    left = [row for row in rows if not row.record.was_interrupted]
    return left if any(row.record.status == "ok" for row in left) else rows


def rivals(groups: Sequence[CellRuns]) -> dict[Place, list[CellRuns]]:
    """By place, those whose throughputs may be compared: successful, timed, and not the reference.

    Those that diverged do other work; the reference is one process on the whole batch. A round in which a
    cell failed is none of that cell's; the others count.
    """
    found: dict[Place, list[CellRuns]] = {}
    for group in groups:
        if group.has_result and group.parity != "diverged" and not group.is_reference and group.values(SPEED):
            found.setdefault(group.place, []).append(group)
    return found


BASE = "ddp"
"""Cells are compared with this backend at the same place; where it is not, with the first that is listed."""


def rankings(groups: Sequence[CellRuns], key: str = SPEED) -> dict[Place, Ranking]:
    """Of each place the order of its rivals by seconds per token, which step times and rates share."""
    return {place: rank_speeds(compared, key) for place, compared in rivals(groups).items()}


def rank_speeds(groups: Sequence[CellRuns], key: str = SPEED, base: CellRuns | None = None) -> Ranking:
    """The order of cells of one place by seconds per token, or by another clock."""
    base = base or next((group for group in groups if group.backend == BASE), groups[0])
    return _ranking({group.label: group for group in groups}, base.label, key)


def _ranking(groups: Mapping[str, CellRuns], base: str, key: str) -> Ranking:
    return Ranking(
        values={name: group.by_round(key) for name, group in groups.items()},
        base=base,
        turns={name: group.in_turns(key) for name, group in groups.items()},
        began={name: group.began(key) for name, group in groups.items()},
    )


def place_to_compare(groups: Sequence[CellRuns]) -> Place | None:
    """Where most backends were timed; of equals the largest world size. None where nothing was.

    Several ranks come before one, which has nothing to shard, and ranks that have their cores for
    themselves before those that take turns on them; of equals those with the kernels that jobs use. The
    reference decides where nothing else was timed.
    """
    timed = [g for g in groups if g.has_result and g.values(SPEED)]
    timed = [g for g in timed if not g.is_reference] or timed
    counts = Counter(g.place for g in timed)

    def worth(group: CellRuns) -> tuple[bool, bool, int, int, bool]:
        size = group.world_size
        usual = not is_deterministic(group.record)
        return size > 1, not shares_cores(group.record), counts[group.place], size, usual

    return max(timed, key=worth).place if timed else None


def job_marks(groups: Sequence[CellRuns]) -> dict[str, str]:
    """Suffix that names the job, ', job 0123456789ab'; empty if there is only one."""
    jobs = {group.record.job_id for group in groups}
    return {job: f", job {job}" if len(jobs) > 1 else "" for job in jobs}


def repeat_spreads(groups: Sequence[CellRuns]) -> dict[str, float | None]:
    """For each cell that succeeded more than once: the largest loss difference of its repeats.

    None where a loss of one of them is missing.
    """
    marks = job_marks(groups)
    spreads: dict[str, float | None] = {}
    for group in groups:
        succeeded = [run for run in group.runs if run.record.status == "ok"]
        if len(succeeded) > 1:
            first, *others = (run.series for run in succeeded)
            differences = [aligned(first, other).largest_loss_difference for other in others]
            known = [value for value in differences if value is not None]
            name = f"{group.cell.key}{marks[group.record.job_id]}"
            spreads[name] = max(known) if len(known) == len(differences) else None
    return spreads


class Runs:
    """Rows in the order in which they are shown."""

    def __init__(self, rows: Iterable[JudgedRun]) -> None:
        self.rows = list(rows)

    @cached_property
    def groups(self) -> list[CellRuns]:
        """The rows by cell: the repeats of one job, backend and world size together."""
        return group_repeats(self.rows)
