"""Records to comparison rows: each run with the reference of its own job, cut alike where that matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from harness.backends.registry import BUILT_IN, REFERENCE
from harness.judge.agreement.job_equivalence import from_step, job_differences
from harness.judge.agreement.parity import (
    TIGHT,
    Judgement,
    Noise,
    Parity,
    Tolerance,
    is_repetition,
    is_variant,
    judge,
    measure_noise,
)
from harness.judge.distance import aligned
from harness.judge.facts import BY_KEY, METRICS, SPEED, STEP, Metric
from harness.judge.quantities import Run, unjudged_amounts
from harness.judge.run_conditions import (
    Spread,
    began_at,
    is_deterministic,
    labelled,
    script_names,
    sessions,
    shares_cores,
    spread,
    varying,
    words,
)
from harness.judge.statistics import Ranking, Round, Timed
from harness.judge.wording import CellName
from harness.nested import grouped
from harness.record import Record
from harness.record.workload import is_another_computation, samples_at_once


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What one run is held to."""

    reference: Run
    noise: Noise
    unjudged: str | None = None
    """Why its losses cannot be held to that; None: they can."""


@dataclass(frozen=True, kw_only=True)
class References:
    """The reference of a job, its repetitions, and the noise of each that runs are judged by."""

    plain: Run
    repetitions: tuple[Run, ...]
    _known: dict[int, Yardstick] = field(default_factory=dict)
    """By samples at once."""

    @classmethod
    def of(cls, plain: Run, runs: Iterable[Run]) -> References:
        """`runs`: all of its job."""
        found = (run for run in runs if run is not plain and is_repetition(run.record))
        return cls(plain=plain, repetitions=tuple(run for run in found if run.record.resumed is None))

    def of_run(self, run: Run) -> Yardstick:
        """What a run is held to; the reference from the step on at which a resumed run began."""
        record, plain = run.record, self._with_noise(self.plain, self.plain)
        if run is self.plain or not is_another_computation(record, self.plain.record):
            return _from(plain, record)
        cut = self._cut(samples_at_once(record))
        if cut is None:
            return _from(replace(plain, unjudged=_why(record, self.plain.record)), record)
        # A loss that gathers what other ranks computed is that of the whole batch.
        both = _from(cut, record), _from(plain, record)
        limit = cut.noise.widest(record).loss
        losses = (
            [step.loss for step in run.steps] for run in (record, *(one.reference.record for one in both))
        )
        steps = [one for one in zip(*losses, strict=False) if None not in one]
        # The first step that tells the two apart, before most updates, shows which was computed.
        telling = (one for one in steps if abs(one[1] - one[2]) > limit)
        own, by_cut, by_plain = next(telling, steps[0] if steps else (0.0, 0.0, 0.0))
        return both[abs(own - by_plain) < abs(own - by_cut)]

    def _cut(self, samples: int) -> Yardstick | None:
        """The reference with as many samples at once; None: it did not run, or chance decides its losses."""
        split = self.plain.record.split
        if split is not None and split.varies:
            return None
        label = f"{REFERENCE}:micro_batch_size={samples}"
        cuts = [r for r in self.repetitions if r.record.backend.label == label and r.record.status == "ok"]
        if not cuts:
            return None
        record = cuts[0].record.model_copy(update={"split": split})
        return self._with_noise(replace(cuts[0], record=record), cuts[0])

    def _with_noise(self, reference: Run, made: Run) -> Yardstick:
        samples = samples_at_once(reference.record)
        if samples not in self._known:
            others = [run.record for run in self.repetitions if run is not made]
            noise = measure_noise(reference.record, others)
            self._known[samples] = Yardstick(reference=reference, noise=noise)
        return self._known[samples]


def _from(found: Yardstick, record: Record) -> Yardstick:
    if record.resumed is None:
        return found
    reference = found.reference
    return replace(
        found, reference=replace(reference, record=from_step(reference.record, record.resumed.step))
    )


SPLIT = "the loss depends on how the batch is split"


def _why(record: Record, reference: Record) -> str:
    mine, other = (
        next((step.loss for step in reversed(run.steps) if step.loss is not None), None)
        for run in (record, reference)
    )
    alike = mine is not None and other is not None and mine != other and f"{mine:.5g}" == f"{other:.5g}"
    digits = 9 if alike else 5
    text = f"{SPLIT}: {_last(record, mine, digits)}, {_last(reference, other, digits)} in the reference"
    if reference.split is not None and reference.split.varies:
        return f"{text}; it draws random numbers for each part, or keeps a state that each pass changes"
    samples = samples_at_once(record)
    return f"{text}; no record of {REFERENCE}:micro_batch_size={samples}, which 'compare' runs for this"


def _last(record: Record, loss: float | None, digits: int) -> str:
    """'1.2345 in step 7 with 4 samples at once'."""
    at = record.steps[-1].step if record.steps else 0
    samples = samples_at_once(record)
    shown = f"{loss:.{digits}g}" if loss is not None else "not finite"
    return f"{shown} in step {at} with {samples} sample{'s' if samples > 1 else ''} at once"


@dataclass(frozen=True, kw_only=True, eq=False)
class JudgedRun:
    """One run and how it compares with its reference; equal to itself only, which makes it a key."""

    run: Run
    judgement: Judgement
    label_suffix: str = ""
    """What its label shows in brackets; empty if nothing."""
    reference: Run | None = None
    """The run that it was judged by."""
    noise: Noise | None = None
    """What counts as rounding in this job."""
    whole: Run | None = None
    """The reference on the whole batch, where it was judged by one that takes fewer samples at once."""
    same_job_as: Run | None = None
    """The run that it must be the same job as; `judgement.not_same_job` holds where it is not."""

    @property
    def record(self) -> Record:
        return self.run.record

    @property
    def label(self) -> str:
        return self.run.label

    @property
    def backend(self) -> str:
        return self.run.backend

    @property
    def cell(self) -> CellName:
        return self.run.cell

    @property
    def is_reference(self) -> bool:
        return self.reference is self.run

    @property
    def at_once(self) -> int | None:
        """How many samples at once its reference takes, where that is not the whole batch."""
        return samples_at_once(self.reference.record) if self.whole and self.reference else None

    @property
    def is_comparable(self) -> bool:
        return not self.judgement.not_same_job

    @property
    def is_of_another_job(self) -> bool:
        return self.same_job_as is not None and self.same_job_as.record.job_id != self.record.job_id

    def as_json(self) -> dict[str, Any]:
        """The row of `compare --json`: bytes per rank, rates over all ranks, None if not measured."""
        return dict(self.figures)

    @cached_property
    def figures(self) -> Mapping[str, Any]:
        """`as_json`, not to be changed: computed once for every section of a report."""
        record = self.record
        return {
            "backend": self.label,
            "world_size": record.world.world_size,
            "repeat": record.repeat,
            "job_id": record.job_id,
            "status": record.status,
            "reason": reason(record),
            "run_id": record.run_id,
            **{metric.key: metric.read(self.run, self.judgement) for metric in METRICS},
            "parity": self.judgement.parity,
            "parity_reason": self.judgement.reason,
            "not_judged": list(unjudged_amounts(record)),
        }


def reason(record: Record, *, with_rank: bool = True) -> str | None:
    """Why a run has no complete result, in one line; None if it has. `with_rank` names who failed."""
    if record.reasons:
        return "; ".join(record.reasons)
    if record.error is None:
        return None
    error = record.error
    step = [f"step {error.step}"] if error.step is not None else []
    places = [f"rank {error.rank}", *step, *([error.phase] if error.phase is not None else [])]
    where = f" ({', '.join(places)})" if with_rank and error.rank is not None else ""
    message = record.error.message.strip() or "no message"
    return f"{record.error.kind}{where}: {message.splitlines()[0]}"


def make_rows(records: Iterable[Record]) -> list[JudgedRun]:
    """Judge each run by the reference run of the same job; in the order of `in_order`.

    Of several references of a job one that worked is preferred. Scripts that were compared are judged by the
    first that trained. Variants of the reference only serve to measure noise and get no row.
    """
    records = in_order(records)
    references: dict[str, Record] = {}
    for record in records:
        if record.backend.label == REFERENCE and record.resumed is None:
            first = references.get(record.job_id)
            if first is None or first.status != "ok" or is_deterministic(record) > is_deterministic(first):
                references[record.job_id] = record
    for record in records:
        base = record.observation.judged_by if record.observation else None
        if base == record.backend.label and record.status == "ok":
            references.setdefault(record.job_id, record)
    stand_ins = _stand_ins(records, references)
    listed = [r for r in records if not (is_variant(r) and r.job_id in references)]
    places = grouped(((record.job_id, record.world.world_size), record) for record in listed)
    names = {place: varying(of_place) for place, of_place in places.items()}
    suffixes = {id(r): words(r, names[r.job_id, r.world.world_size]) for r in listed}
    scripts = script_names(listed)
    labels = {id(r): labelled(r.backend.label, scripts.get(id(r), "")) for r in records}
    runs = {
        id(r): Run(record=r, label=labelled(labels[id(r)], suffixes.get(id(r), "")), session=session)
        for r, session in zip(records, sessions(records), strict=True)
    }
    by_job = grouped((record.job_id, runs[id(record)]) for record in records)
    known = {job_id: References.of(runs[id(of)], by_job[job_id]) for job_id, of in references.items()}
    rows = []
    for record in listed:
        run, of_job = runs[id(record)], known.get(record.job_id)
        found = of_job.of_run(run) if of_job is not None else None
        judge_by, noise = (found.reference, found.noise) if found is not None else (None, None)
        stand_in = runs.get(id(stand_ins.get(record.job_id)))
        rows.append(
            JudgedRun(
                run=run, label_suffix=suffixes[id(record)], reference=judge_by, noise=noise,
                judgement=judge(
                    judge_by, run, noise, stand_in=stand_in, unjudged=found.unjudged if found else None
                ),
                whole=of_job.plain if of_job and judge_by and is_variant(judge_by.record) else None,
                same_job_as=stand_in if record.job_id in stand_ins else judge_by,
            )
        )  # fmt: skip
    return rows


def _stand_ins(records: Sequence[Record], references: dict[str, Record]) -> dict[str, Record | None]:
    """For each job whose reference has no result, the run that the others must be the same job as."""
    succeeded = next((reference for reference in references.values() if reference.status == "ok"), None)
    found: dict[str, Record | None] = {}
    for job_id in dict.fromkeys(record.job_id for record in records):
        reference = references.get(job_id)
        if reference is None and succeeded is not None:
            # If another job has a reference and this one has none, this one does not belong here.
            found[job_id] = succeeded
        elif reference is None or reference.status != "ok":
            found[job_id] = most_agreed([r for r in records if r.job_id == job_id and r.status == "ok"])
    return found


def in_order(records: Iterable[Record]) -> list[Record]:
    """Jobs as they come; in each by ranks, nodes and backend as they are listed, third parties last."""
    records = list(records)
    jobs = {job_id: place for place, job_id in enumerate(dict.fromkeys(r.job_id for r in records))}
    listed = {name: place for place, name in enumerate(BUILT_IN)}
    labels = {label: place for place, label in enumerate(dict.fromkeys(r.backend.label for r in records))}

    def place(record: Record) -> tuple[int, ...]:
        world, backend = record.world, record.backend
        of_backend = listed.get(backend.name, len(listed)), labels[backend.label]
        return jobs[record.job_id], world.world_size, world.nodes, *of_backend, record.repeat

    return sorted(records, key=place)


def most_agreed(records: Sequence[Record]) -> Record | None:
    """Among runs without a reference, the one whose job most others share; the first on a tie.

    Each is compared with the first of every group so far, not against all others: a matrix may be large.
    """
    groups: list[list[Record]] = []
    for record in records:
        own = next((group for group in groups if not job_differences(group[0], record)), None)
        if own is None:
            groups.append([record])
        else:
            own.append(record)
    return max(groups, key=len)[0] if groups else None


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
        """Runs that the cell's figures are made of: not those without a result, where others have one."""
        return [row for row in self.rows if row.record.status == "ok"] if self.has_result else self.rows

    @property
    def record(self) -> Record:
        """The first repeat with a result, for what all repeats share."""
        return self.counted[0].record

    @cached_property
    def runs(self) -> list[Run]:
        return [row.run for row in self.counted]

    @property
    def label(self) -> str:
        return self.rows[0].label

    @property
    def backend(self) -> str:
        return self.rows[0].backend

    @property
    def world_size(self) -> int:
        return self.record.world.world_size

    @property
    def key(self) -> RepeatsKey:
        return self.record.job_id, self.label, self.world_size

    @property
    def place(self) -> Place:
        """Job, number of ranks and run conditions: only runs that share them are compared."""
        return self.record.job_id, self.world_size, self.rows[0].label_suffix

    @property
    def cell(self) -> CellName:
        return self.rows[0].cell

    @property
    def is_reference(self) -> bool:
        return self.record.backend.name == REFERENCE

    @property
    def is_base_of_scripts(self) -> bool:
        """Whether it is the row of a comparison of scripts that the others are judged by."""
        return self.record.observation is not None and any(row.is_reference for row in self.rows)

    @property
    def judges_others(self) -> bool:
        """Whether it is what others are held to: the reference, or the base of scripts."""
        return self.is_reference or self.is_base_of_scripts

    @property
    def status(self) -> str:
        """The status that repeats share, or each with its count."""
        counts = Counter(row.record.status for row in self.rows)
        return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{k} x{n}" for k, n in counts.items())

    @property
    def succeeded(self) -> bool:
        return all(row.record.status == "ok" for row in self.rows)

    @cached_property
    def has_result(self) -> bool:
        """Whether a repeat succeeded and no other lost its loss or norm; others may have failed."""
        statuses = {row.record.status for row in self.rows}
        return "ok" in statuses and "diverged" not in statuses

    @property
    def parity(self) -> Parity:
        return min((row.judgement.parity for row in self.counted), key=LEVELS.index)

    @property
    def at_once(self) -> int | None:
        """How many samples at once its reference takes, where that is not the whole batch."""
        return next((row.at_once for row in self.counted if row.at_once), None)

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
        if self._judged_by is None:
            return None
        noise, level = self._judged_by
        return noise.tight if level == TIGHT else noise.widest(self.record)

    @property
    def is_on_grid(self) -> bool:
        """Whether the spacing of its losses is what limits them."""
        level = self._judged_by[0].of_level(self._judged_by[1]) if self._judged_by else None
        return self.limits is not None and level is not None and self.limits.loss > level.loss

    @property
    def assumed(self) -> str:
        """'3 roundings of bf16': what these limits are where no run measured them, else ''."""
        return self._judged_by[0].assumed(self._judged_by[1]) if self._judged_by else ""

    @property
    def timed_steps(self) -> list[list[float]]:
        return [run.step_seconds for run in self.runs]

    @cached_property
    def step_seconds(self) -> list[float]:
        return [seconds for steps in self.timed_steps for seconds in steps]

    @cached_property
    def rank_peaks(self) -> list[int]:
        return [peak for run in self.runs for peak in run.rank_peaks]

    @cached_property
    def figures(self) -> dict[str, float | None]:
        pools = {metric: self.pool(metric) for metric in METRICS}
        return {metric.key: metric.aggregate(pool) if pool else None for metric, pool in pools.items()}

    def pool(self, metric: Metric) -> list[float]:
        if metric.pool is None:
            return self.values(metric.key)
        return [value for run in self.runs for value in metric.pool(run)]

    def values(self, key: str) -> list[float]:
        """One figure per repeat, those that have none left out."""
        return [value for row in self.counted if (value := row.figures[key]) is not None]

    def rounds(self, key: str) -> dict[Round, Timed]:
        """Each repeat that has this figure by its round; of rates the seconds per unit are compared."""
        found: dict[Round, Timed] = {}
        seen: Counter[tuple[int, int]] = Counter()
        for row in self.counted:
            if (value := row.figures[key]) is not None:
                record, number = row.record, (row.run.session, row.record.repeat)
                (clock,), turns = BY_KEY[key].clock([value]), record.turns
                beside = turns.beside if turns is not None else None
                found[*number, seen[number]] = Timed(clock, began_at(record), record.run_id, beside)
                seen[number] += 1
        return found

    @cached_property
    def spread(self) -> Spread:
        """How far the mean timed steps of the repeats lie apart, within and between sessions."""
        found = grouped((session, run.value) for (session, *_), run in self.rounds(STEP).items())
        return spread(found)

    def median(self, key: str) -> float | None:
        values = self.values(key)
        return BY_KEY[key].middle(values) if values else None


def group_repeats(rows: Sequence[JudgedRun]) -> list[CellRuns]:
    """Rows of one job, label and world size together, in their first order.

    Runs that the user ended are left out where others of the cell succeeded: nothing failed.
    """
    groups = grouped(((row.record.job_id, row.label, row.record.world.world_size), row) for row in rows)
    found = []
    for group in groups.values():
        left = [row for row in group if not row.record.was_interrupted]
        found.append(CellRuns(left if any(row.record.status == "ok" for row in left) else group))
    return found


def rivals(groups: Sequence[CellRuns]) -> dict[Place, list[CellRuns]]:
    """Cells of each place whose throughputs may be compared: successful, timed, and not the reference.

    Those that diverged do other work; the reference is one process on the whole batch. A round in which a
    cell failed is none of that cell's; the others count.
    """
    return grouped(
        (group.place, group)
        for group in groups
        if group.has_result and group.parity != "diverged" and not group.is_reference and group.values(SPEED)
    )


BASE = "ddp"
"""Cells are compared with this backend at the same place; where it is not, with the first that is listed."""


def rankings(groups: Sequence[CellRuns], key: str = SPEED) -> dict[Place, Ranking]:
    """Order of each place's rivals by seconds per token, which step times and rates share."""
    return {place: rank_speeds(compared, key) for place, compared in rivals(groups).items()}


def rank_speeds(groups: Sequence[CellRuns], key: str = SPEED, base: CellRuns | None = None) -> Ranking:
    """The order of cells of one place by seconds per token, or by another clock."""
    base = base or next((group for group in groups if group.backend == BASE), groups[0])
    return Ranking({group.label: group.rounds(key) for group in groups}, base.label)


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
