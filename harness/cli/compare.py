"""`harness compare`: runs the missing cells of a matrix, then compares all of them."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import click

from harness.backends import registry
from harness.backends.base import World
from harness.bounds import MOST_REPEATS
from harness.cli import options
from harness.cli.output import MatrixProgress, View, duration, echo
from harness.errors import HarnessError
from harness.files import stream_number
from harness.job.batch import BatchLayout
from harness.job.experiment import CompareSection, Experiment
from harness.judge.wording import CellName, a_few, counted, listed, ranks
from harness.launch import external_rank, started_as_rank
from harness.launch.cells import BOTH_KERNELS, have_both_kernels, is_refused, plan, reusable, with_same_split
from harness.launch.external import OthersRecords, claimed, forget_dead_claims
from harness.launch.launcher import AUTO, LocalLauncher, groups, modules_to_preload, running_cell, take_turns
from harness.launch.owner import forget_never_begun, made_in_job, record_abandoned, requeued_job
from harness.nested import differences
from harness.plan.scenario import why_not_planned
from harness.record import PredictionPart, Record
from harness.record.provenance import environment, package_versions
from harness.record.store import Store, keep_runs
from harness.run_directory.request import Resume, RunRequest
from harness.tell.formats import fitted

if TYPE_CHECKING:
    from harness.cli.scripts import Scripts
    from harness.judge.comparison import Comparison
    from harness.judge.statistics import Ratio
    from harness.plan.fit import LargestBatches
    from harness.plan.preflight import CellPredictions

force_option = click.option("--force", is_flag=True)


def predict_cells(
    cells: Sequence[RunRequest], facts: Mapping[str, dict[str, Any]], device: str, memory_limit: int | None,
    *, force: bool, trace: Callable[[str], str] | None = None,
) -> CellPredictions:  # fmt: skip
    """Predict cells that may run on this machine.

    `facts`: by job id, what the check of the job returned; empty: configurations are all that is known.
    """
    from harness.plan.hardware import limits_here
    from harness.plan.preflight import predict_runs

    return predict_runs(cells, limits_here(device, memory_limit), facts, force=force, trace=trace)


def predict_one(
    cell: RunRequest, facts: dict[str, Any], experiment: Experiment, launcher: LocalLauncher, *, force: bool,
    shows: bool = True,
) -> PredictionPart | None:  # fmt: skip
    """Predict one cell, and show it if `shows`. Raises HarnessError if it cannot fit."""
    by_job, limit = {cell.job_id: facts}, experiment.runtime.memory_limit
    predicted = predict_cells([cell], by_job, launcher.device, limit, force=force, trace=launcher.trace)
    if problem := _refused(cell, predicted):
        raise HarnessError(problem)
    if shows:
        say_before([cell], [facts], predicted, experiment)
    return predicted.parts.get(cell.key)


def refuse_as_rank(request: RunRequest, *, force: bool) -> None:
    """Raise HarnessError if the ranks of this node, one of which this process is, cannot fit.

    One rank of a node asks, before it meets the others: they wait for it and hold nothing yet.
    """
    predicted = predict_cells([request], {}, request.device, request.memory_limit_bytes, force=force)
    if problem := _refused(request, predicted):
        if external_rank() != 0:  # the first rank of all shows its own error
            echo(f"harness: {problem}", err=True)
        raise HarnessError(problem)


def _refused(cell: RunRequest, predicted: CellPredictions) -> str:
    """Why a cell is not started; empty: it is."""
    refusal = predicted.refusal(cell.key)
    return "" if refusal is None else f"{cell.backend} on {ranks(cell.world_size)}: {refusal}"


def say_before(
    cells: Sequence[RunRequest], facts: Collection[Mapping[str, Any]], predicted: CellPredictions,
    experiment: Experiment,
) -> None:  # fmt: skip
    """What is known before cells run, on standard error: what they are predicted to need, why ranks of a
    strategy that shards weights build the model whole, and that batches repeat samples."""
    show(predicted)
    loading = experiment.runtime.loading
    reasons = {found["model"].get("whole_because") for found in facts} if loading == "slices" else set()
    for reason in sorted(reasons - {None}):
        echo(f"loading: full (every rank builds the whole model): {reason}", err=True)
    samples = min((found["data"]["training_samples"] for found in facts), default=0)
    batch = max(cell.layout.global_batch_size for cell in cells)
    if samples < batch:
        echo(
            f"data: {samples} training samples are less than a global batch of {batch}: each repeats some",
            err=True,
        )


def show(predicted: CellPredictions) -> None:
    for line in predicted.lines():
        echo(line, err=True)


SPLIT = (
    "the loss depends on how the batch is split: the reference runs again with as many samples at once as "
    "the ranks take"
)


@dataclass(kw_only=True)
class MissingCells:
    """Runs cells; what ran before an interruption is kept.

    Those that are predicted not to fit get a record that says so, unless `force`. `rounds`: how many are
    asked; None: until speeds are settled.
    """

    store: Store
    experiment: Experiment
    device: str
    found: Sequence[tuple[Path, Record]]
    rounds: int | None
    job: str | None
    """Of Slurm, where it was started again."""
    fresh: bool
    force: bool
    view: View

    def __post_init__(self) -> None:
        self._said: set[str] = set()
        self._foretold: set[tuple[str, int, str, BatchLayout]] = set()
        self._others = OthersRecords(self.store.root, [path for path, _ in self.found])
        self.interrupted = False
        self._launcher: LocalLauncher | None = None

    def records(
        self, cells: Sequence[RunRequest], known: Mapping[str, Record], batches: LargestBatches | None
    ) -> list[Record]:
        """The records of all cells, as far as they ran, the missing ones run now.

        `batches`: a cell that is out of memory runs again with the next smaller micro-batch.
        """
        if have_both_kernels(cells):
            self.view.say(BOTH_KERNELS)
        done = dict(known)
        if have_record := sum(cell.key in done for cell in cells):
            again = f"job {self.job} was started again: " if self.job is not None else ""
            self.view.say(f"{again}{have_record} of {len(cells)} cells have a record")
        while True:
            ran = [done[cell.key] for cell in cells if cell.key in done]
            done |= self.run([cell for cell in cells if cell.key not in done], ran)
            wanted = cells
            if not self.interrupted:
                asked = batches.after(cells, done) if batches is not None else cells
                wanted = with_same_split(asked, done, self.experiment, self.device)
                if len(wanted) > len(asked):
                    self.view.say(SPLIT)
            if wanted == cells:
                return [done[cell.key] for cell in cells if cell.key in done]
            cells = wanted

    def run(self, cells: Sequence[RunRequest], known: Iterable[Record]) -> dict[str, Record]:
        """Records by cell. `known`: records of other cells of the comparison."""
        done: dict[str, Record] = {}
        if not cells:
            return done
        if self._launcher is None:
            preload = modules_to_preload(self.experiment, [cell.backend for cell in cells])
            self._launcher = LocalLauncher(self.device, preload)
            # What would otherwise be done between two runs is done while the fork server imports.
            for name in ("harness.plan.hardware", "harness.judge.comparison", "harness.tell.terminal"):
                import_module(name)
            environment()
        launcher = self._launcher
        facts = checked_jobs(launcher, cells)
        predicted = predict_cells(
            cells, facts, launcher.device, self.experiment.runtime.memory_limit, force=self.force,
            trace=launcher.trace,
        )  # fmt: skip
        names = {(cell.backend, cell.world_size, cell.job_id, cell.layout) for cell in cells}
        if not self.view.quiet and not names <= self._foretold:  # further rounds bring no news
            self._foretold |= names
            say_before(cells, facts.values(), predicted, self.experiment)
        for _, record in self.found:  # about to run, or to be judged again
            if is_refused(record) and record.cell in {cell.key for cell in cells}:
                self.store.discard(record.run_id)

        def say_once(text: str) -> None:
            if text not in self._said:
                self._said.add(text)
                self.view.say(text)

        progress = MatrixProgress(len(cells), sys.stderr, self.view)
        unknown = {run.key for runs in predicted.unknown.values() for run in runs}
        try:
            for group in groups(cells, self._turns, self.device, predicted.parts, unknown, known, say_once):
                with closing(self._records(launcher, group, predicted, progress)) as ends:
                    for key, record in ends:
                        done[key] = record
                        progress.end(key, _line(record))
                        self.interrupted |= record.was_interrupted
                if self.interrupted:
                    break
        finally:
            progress.close()
        return done

    @property
    def _turns(self) -> int | None:
        """Timed steps of a turn; None: each cell runs whole."""
        from harness.judge.statistics import interval_runs

        asked = self.experiment.compare.turns
        if asked != "auto":
            return asked
        return AUTO if self.rounds is None or self.rounds >= interval_runs() else None

    def _records(
        self, launcher: LocalLauncher, group: Sequence[RunRequest], predicted: CellPredictions,
        progress: MatrixProgress,
    ) -> Generator[tuple[str, Record]]:  # fmt: skip
        """Each cell of a group with its record, as they end."""
        with ExitStack() as claims:
            missing = set()
            # In one order whatever the plan: who waits for a claim holds none that the other waits for.
            for cell in sorted(group, key=lambda cell: cell.key):
                name = CellName(cell.backend, cell.world_size)
                waiting = f"{name}: another comparison on this folder runs it; waiting for its record"
                claims.enter_context(claimed(self.store.root, cell.key, partial(progress.say, waiting)))
                if (self.fresh and self.job is None) or (found := self._others.of_cell(cell.key)) is None:
                    missing.add(cell.key)
                else:
                    yield cell.key, found
            by_key = {cell.key: cell for cell in group if cell.key in missing}
            runs = {
                key: running_cell(
                    cell, self.store, launcher, command=options.command_line(), on_event=progress,
                    prediction=predicted.parts.get(key), refusal=predicted.refusal(key),
                    takes_turns=len(by_key) > 1,
                )
                for key, cell in by_key.items()
            }  # fmt: skip
            with closing(take_turns(runs, self._turns or 1, lambda key: progress.begin(by_key[key]))) as ends:
                for key, record in ends:
                    self._others.is_own(self.store.record_path(record))
                    yield key, record


def largest_batches(cells: Sequence[RunRequest], experiment: Experiment, device: str) -> LargestBatches:
    """What decides the micro-batches of `compare --batch largest` on this machine.

    Raises HarnessError where ranks have no limit of memory.
    """
    from harness.plan.fit import LargestBatches, require_limit
    from harness.plan.hardware import limits_here
    from harness.plan.prediction import Predictors

    limits = limits_here(device, experiment.runtime.memory_limit)
    require_limit(limits)
    launcher = LocalLauncher(device, modules_to_preload(experiment, [cell.backend for cell in cells]))
    return LargestBatches(
        experiment=experiment, limits=limits, facts=checked_jobs(launcher, cells),
        by=Predictors.traced_by(launcher.trace),
    )  # fmt: skip


def checked_jobs(launcher: LocalLauncher, cells: Sequence[RunRequest]) -> dict[str, dict[str, Any]]:
    """What the check of each job returned, by job id."""
    jobs = {cell.job_id: cell.job for cell in cells}
    return {job_id: launcher.check(job.model_dump_json()) for job_id, job in jobs.items()}


def open_store(runs: Path) -> Store:
    """The folder of runs, which can be written; runs whose launcher was killed are recorded and named."""
    store = Store(runs)
    store.prepare()
    forget_never_begun(store.root)
    forget_dead_claims(store.root)
    for record in record_abandoned(store.root):
        echo(
            f"run {record.run_id} was abandoned by its launcher and is recorded now: {record.status}",
            err=True,
        )
    return store


def _line(record: Record) -> str:
    """What a person who waits reads of a cell; a record that cannot be shown is still one."""
    from harness.judge.comparison import Comparison
    from harness.tell.tables import cell_line

    try:
        (row,) = Comparison([record]).rows
        return cell_line(row)
    except Exception as error:  # what a third party reports may break any figure
        return f"{record.backend.label}: {record.status}; no figures ({type(error).__name__})"


FIRST_LOOK = 8
"""Rounds below which no order is clear enough to stop."""
GROWTH = 1.25
"""Rounds at a look over those at the look before: few looks, few chances to be misled."""
Name = tuple[str, str, int]
"""Job, backend and ranks."""


@dataclass(frozen=True, kw_only=True)
class Until:
    """When no round is added any more."""

    precision: float | None = None
    """Half an interval over its ratio; None: any, if the order is settled."""
    deadline: float | None = None
    """By the monotonic clock; None: none."""


def parse_within(text: str) -> float:
    """'3%' as 0.03. Raises HarnessError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if found is None or not 0 < float(found[1]) < 100:
        raise HarnessError(f"--within was given '{text}'; give half the width of an interval, such as 3%")
    return float(found[1]) / 100


def add_rounds(
    plan: Callable[[int], Sequence[Any]], made: MissingCells | Scripts, known: Mapping[str, Record],
    records: Sequence[Record], until: Until, view: View,
) -> list[Record]:  # fmt: skip
    """The records, with those of added rounds.

    `plan`: the cells of so many rounds; `known`: records that are used instead of a run. A cell that is
    settled is left out of later rounds; its base is not. A round in which a cell failed is none of that
    cell's; after two of them on end, or where it diverged, it is run no more. Where that is the base, those
    compared with it are not either, unless they are compared with the next one, since it diverged.
    """
    found = {record.cell: record for record in records}
    rounds = 1 + max((record.repeat for record in records), default=0)
    look, longest = max(rounds, FIRST_LOOK), 0.0
    wanted, bases = _compared(list(found.values()))
    if not wanted and not made.interrupted:
        view.say("no round is added: no two cells are compared in speed")
    while wanted and not made.interrupted:
        last = [record for record in found.values() if record.repeat >= rounds - 2]
        without = {_name(r) for r in last} - {_name(r) for r in last if r.status in ("ok", "diverged")}
        lost = {*wanted, *bases} & without
        if rounds >= look:
            before, (now, bases) = {*wanted, *bases}, _compared(list(found.values()))
            lost |= before - {*now, *bases}
            wanted = {
                name: now[name]
                for name in wanted
                if name in now and not now[name].is_settled(until.precision)
            }
            look = ceil(rounds * GROWTH)
        if lost:
            others = "; nor of cells that are compared with it" if lost & bases else ""
            view.say(f"no further round of {_named(dict.fromkeys(sorted(lost)))}: failed or diverged{others}")
            kept = {_place(base) for base in bases - lost}
            wanted = {n: ratio for n, ratio in wanted.items() if n not in lost and _place(n) in kept}
        if not wanted:
            if not lost:
                view.say(f"speeds are settled after {counted(rounds, 'round')}")
            break
        began = time.monotonic()
        if rounds >= MOST_REPEATS or (until.deadline is not None and began + longest > until.deadline):
            shown = {  # that the report will show as open, or less precise than asked
                name: ratio
                for name, ratio in _compared(list(found.values()))[0].items()
                if name in wanted
                and (ratio.order == "open" or (until.precision and not ratio.is_settled(until.precision)))
            }
            view.say(f"no further round after {counted(rounds, 'round')}; open: {_named(shown) or 'none'}")
            break
        rounds += 1
        view.say(f"round {rounds}; open: {_named(wanted)}")
        names = {*wanted, *(base for base in bases if _place(base) in set(map(_place, wanted)))}
        cells = [
            cell
            for cell in plan(rounds)
            if cell.repeat == rounds - 1 and (cell.job_id, cell.backend, cell.world_size) in names
        ]
        if not cells:
            break
        taken = {cell.key: known[cell.key] for cell in cells if cell.key in known}
        found |= taken
        # Who joins a round that lies before others is not compared with it.
        newest = max((record.repeat for record in known.values() if _name(record) in names), default=0)
        if not taken or rounds > newest:
            found |= made.run([cell for cell in cells if cell.key not in found], found.values())
        longest = max(longest, time.monotonic() - began)
    return list(found.values())


def _name(record: Record) -> Name:
    return record.job_id, record.backend.label, record.world.world_size


def _place(name: Name) -> tuple[str, int]:
    return name[0], name[2]


def _compared(records: Sequence[Record]) -> tuple[dict[Name, Ratio], set[Name]]:
    """Each cell that has a speed, with its ratio to the base of its place; and these bases."""
    from harness.judge.comparison import Comparison
    from harness.judge.run_conditions import is_deterministic

    comparison = Comparison(records).comparable
    ratios: dict[Name, Ratio] = {}
    bases = set()
    usual = [group for group in comparison.groups if not is_deterministic(group.record)]
    for group in usual or comparison.groups:
        order = comparison.rankings.get(group.place)
        name = _name(group.record)
        if order is None or group.label not in order.names:
            continue
        if group.label == order.base:
            bases.add(name)
        else:
            ratios[name] = order.to_base[group.label]
    return ratios, bases


def _named(cells: Mapping[Name, Ratio | None]) -> str:
    """'fsdp on 2 (0.81, 0.61 to 1.03) and zero3 on 2': a base has no ratio, nor have too few rounds."""
    named = []
    for (_, label, size), ratio in cells.items():
        named.append(f"{label} on {size}")
        if ratio is not None and ratio.extent is not None and ratio.middle is not None:
            named[-1] += f" ({ratio.middle:.2f}, {ratio.extent.low:.2f} to {ratio.extent.high:.2f})"
    return listed(named)


Runs = Sequence[tuple[Path, Record]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cell before it runs."""

    cell: RunRequest
    why: str
    """Why there is no record, or which one."""
    record: Record | None = None
    """The record that would be used."""
    seconds: float | None = None
    """How long it would run, as like runs of the folder did; None: there are none."""
    runs: bool = True
    """Whether ranks would start if there is no record: not where the strategy cannot run this job."""

    def as_json(self, predicted: CellPredictions) -> dict[str, Any]:
        """The cell in the document of `--dry-run --json`."""
        part = predicted.parts.get(self.cell.key)
        return {
            "backend": self.cell.backend,
            "world_size": self.cell.world_size,
            "repeat": self.cell.repeat,
            "deterministic": self.cell.job.training.deterministic,
            "run_id": self.record.run_id if self.record else None,
            "why": None if self.record else self.why.removeprefix("none: "),
            "seconds": self.seconds,
            "seconds_from": None if self.seconds is None else "runs",
            "prediction": part.model_dump(mode="json") if part else None,
            "no_prediction": predicted.reason(self.cell.key),
        }


def show_plan(
    cells: Sequence[RunRequest],
    known: Mapping[str, Record],
    found: Runs,
    device: str,
    experiment: Experiment,
    *,
    force: bool,
    as_json: bool,
    view: View,
) -> int:
    """Show what `harness compare` would do with these cells, and whether they fit, and do nothing.

    `known`: the records that would be used, by cell; `found`: all of the folder.
    """
    plans = [_planned(cell, known.get(cell.key), found, device) for cell in cells]
    missing = [plan for plan in plans if plan.record is None and plan.runs]
    view.begin("predicting memory")
    limit = experiment.runtime.memory_limit
    predicted = predict_cells([plan.cell for plan in missing], {}, device, limit, force=force)
    missing = [plan for plan in missing if predicted.refusal(plan.cell.key) is None]
    if as_json:
        echo(json.dumps({"cells": [plan.as_json(predicted) for plan in plans]}, indent=1))
        return 0
    headers = ("backend", "ranks", "repeat", "time", "record")
    both = have_both_kernels(cells)
    rows = []
    for one in plans:
        cell = one.cell
        kernels = " (deterministic)" if both and cell.job.training.deterministic else ""
        lasts = "-" if one.seconds is None or one.record else duration(one.seconds)
        rows.append([cell.backend + kernels, cell.world_size, cell.repeat, lasts, one.why])
    echo(fitted([[*map(str, row)] for row in rows], headers, wide=view.wide))
    echo(_summary(missing, len(plans)), err=True)
    if both:
        echo(BOTH_KERNELS, err=True)
    show(predicted)
    return 0


def _summary(missing: Sequence[Plan], cells: int) -> str:
    guessed = [plan.seconds for plan in missing if plan.seconds is not None]
    text = f"{len(missing)} of {cells} cells would run"
    if not missing:
        return text
    if not guessed:
        return f"{text}; how long is not known: nothing alike ran"
    unknown = len(missing) - len(guessed)
    text += f", about {duration(sum(guessed))}"
    return f"{text}, and {unknown} of unknown length" if unknown else text


def _planned(cell: RunRequest, record: Record | None, found: Runs, device: str) -> Plan:
    if record is not None:
        return Plan(cell=cell, record=record, why=record.run_id)
    if registry.strategy_of(cell.backend) is not None:  # else a third party's: only ranks know
        torch_device: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
        world = World.planned(cell.world_size, cell.world_size // cell.nodes, torch_device)
        reason = why_not_planned(cell.backend, cell.job, world, cell.layout.micro_batch_size)
        if reason is not None:
            return Plan(cell=cell, why=f"none: unsupported: {reason}", runs=False)
    why = _why_not(cell, [r for _, r in found])
    return Plan(cell=cell, why=why, seconds=_seconds(cell, found))


def _why_not(cell: RunRequest, records: Sequence[Record]) -> str:
    """Why no record can stand for a cell: what differs from the newest of this backend."""
    alike = [r for r in records if (r.backend.label, r.world.world_size) == (cell.backend, cell.world_size)]
    same = [r for r in alike if r.cell == cell.key]
    if same:
        refused = is_refused(same[-1])
        return "none: it was predicted not to fit" if refused else f"none: the last run is {same[-1].status}"
    if not alike:
        return "none: never ran in this folder"
    nearest = max(alike, key=lambda r: (r.job_id == cell.job_id, r.repeat == cell.repeat, r.created_at))
    return f"none: {_difference(cell, nearest)}"


def _difference(cell: RunRequest, record: Record) -> str:
    if cell.job_id != record.job_id:
        given, other = cell.job.model_dump(mode="json"), record.job.model_dump(mode="json")
        named = [".".join(keys) for keys, _, _ in differences(given, other)]
        return f"another job: {a_few(named)}" if named else "another job: its data or model changed"
    measure = record.measure.model_dump() if record.measure is not None else {}
    if named := [".".join(keys) for keys, _, _ in differences(cell.measure.model_dump(), measure)]:
        return f"measured with other settings: {a_few([f'measure.{name}' for name in named])}"
    if cell.job.training.deterministic != record.job.training.deterministic:
        return "other kernels: training.deterministic"
    if cell.repeat != record.repeat:
        return "this repeat never ran"
    if cell.preset != record.world.preset:
        return f"another preset: {record.world.preset}"
    if cell.memory_limit_bytes != record.world.memory_limit_bytes:
        return "another runtime.memory_limit"
    recorded = record.backend.versions
    here = package_versions(tuple(recorded))
    if changed := [name for name, version in recorded.items() if here.get(name) != version]:
        return f"other versions: {a_few(changed)}"
    return "code, machine, device or threads changed"


def _seconds(cell: RunRequest, found: Runs) -> float | None:
    """Median wall time of the runs most like a cell: of its backend and ranks, of its ranks, or of any."""
    for alike in (
        lambda r: (r.backend.label, r.world.world_size) == (cell.backend, cell.world_size),
        lambda r: r.world.world_size == cell.world_size,
        lambda r: True,
    ):
        times = [s for path, r in found if alike(r) and (s := _wall_seconds(path, r)) is not None]
        if times:
            return median(times)
    return None


def _wall_seconds(path: Path, record: Record) -> float | None:
    """From the start of a run to its record; None where the file was copied since, or has no time."""
    try:
        seconds = path.stat().st_mtime - datetime.fromisoformat(record.created_at).timestamp()
        seconds -= record.turns.waited_seconds if record.turns else 0.0
    except (OSError, ValueError):
        return None
    return seconds if 0 < seconds < time.time() and record.status == "ok" else None


RECORDS_SUFFIX = ".runs"
"""Of the folder with the records of a report."""

# What makes tables is imported where it is used: the ranks' imports, which take longer, start before.


@click.command()
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- SCRIPT ...]")
@click.option("--script", "scripts", multiple=True, metavar="NAME=COMMAND")
@click.option("--reference", metavar="COMMAND")
@options.measuring
@options.job_options
@options.backends_option
@click.option("--nproc")
@options.repeats_option
@click.option("--within")
@click.option("--max-minutes", type=click.FloatRange(0, min_open=True), metavar="MINUTES")
@options.runs_option
@click.option("--report", type=options.OUTPUT_FILE)
@click.option("--batch", type=click.Choice(["equal", "largest"]), default="equal", show_default=True)
@click.option("--fresh", is_flag=True)
@click.option("--strict", is_flag=True)
@force_option
@click.option("--dry-run", is_flag=True)
@options.resume_options
@options.json_option
@options.view_options
@options.given_options
def compare(
    words: tuple[str, ...],
    scripts: tuple[str, ...],
    reference: str | None,
    experiment: Experiment,
    backends: str | None,
    nproc: str | None,
    repeats: int | None,
    within: str | None,
    max_minutes: float | None,
    runs: Path,
    report: Path | None,
    batch: str,
    fresh: bool,
    strict: bool,
    force: bool,
    dry_run: bool,
    resume: Resume | None,
    as_json: bool,
    view: View,
    given: options.GivenFiles,
) -> int:
    """Run the missing cells of backends x world sizes x repeats and compare them all.

    SCRIPT with its arguments, after `--`: a training script of your own, run unchanged under each backend.
    """
    if started_as_rank():
        raise HarnessError(
            "compare starts its own ranks: run it without torchrun, or "
            "start `harness run` under torchrun for each backend"
        )
    ends = max_minutes and time.monotonic() + 60 * max_minutes
    until = Until(precision=None if within is None else parse_within(within), deadline=ends)
    view.begin("checking the job, its data and this machine")
    device = options.resolve_device(experiment.runtime.device)
    sizes = experiment.compare.world_sizes if nproc is None else options.numbers(nproc, "--nproc", "ranks")
    count, job = repeats or experiment.compare.repeats, requeued_job()
    output = Output(
        until=until, report=report, asked=experiment.compare, as_json=as_json, strict=strict, view=view
    )
    if words or scripts:
        from harness.cli.scripts import Scripts, asked_rows, of_script

        rows_by_name, files = asked_rows(
            experiment, words, scripts, given, sizes, backends=backends, nproc=nproc, reference=reference,
            batch=batch != "equal", resume_from=resume, force=force)  # fmt: skip
        options.require_gpus(device, 1 if scripts else max(sizes))
        store, found, known = _opened(runs, report, fresh, None, dry_run=dry_run)
        script = Scripts(
            rows=rows_by_name, is_given=not scripts, world_size=sizes[0], device=device, store=store,
            view=view, experiment=of_script(experiment), given=files, found=found,
        )  # fmt: skip
        if dry_run:
            script.show(script.plan(count), known, as_json=as_json)
            return 0
        return output.finish(script, script.plan, known, script.records(script.plan(count), known))
    if reference is not None:
        raise HarnessError("--reference is for a script, given after `--`; other jobs have a reference")
    asked = options.split_backends(backends) if backends is not None else experiment.compare.backends
    _require_equal_batches(batch, resume is not None, given, adds_rounds=until != Until())
    experiment, rows = given.rows(experiment, view)

    def planned(rounds: int) -> list[RunRequest]:
        return plan(experiment, asked, sizes, rounds, device, resume=resume, rows=rows)

    cells = planned(count)
    options.require_gpus(device, max(sizes))
    store, found, known = _opened(runs, report, fresh, job, dry_run=dry_run)
    batches = largest_batches(cells, experiment, device) if batch == "largest" else None
    if batches is not None:
        cells = batches.enlarged(cells)
        for line in batches.lines(cells):
            echo(line, err=True)
    if dry_run:
        return show_plan(cells, known, found, device, experiment, force=force, as_json=as_json, view=view)
    made = MissingCells(
        store=store, experiment=experiment, device=device, found=found, job=job, fresh=fresh, force=force,
        rounds=count if until == Until() else None, view=view,
    )  # fmt: skip
    return output.finish(made, planned, known, made.records(cells, known, batches))


def _opened(
    runs: Path, report: Path | None, fresh: bool, requeued: str | None, *, dry_run: bool
) -> tuple[Store, Runs, dict[str, Record]]:
    """The folder of runs, the records there that may stand for cells, and those that do, by key.

    Fresh means none, but for those that earlier attempts of the same requeued job made. One that cannot be
    read is named and skipped.
    """
    if report is not None and not dry_run:
        from harness.tell.report import require_writable

        require_writable(report)
    store = Store(runs) if dry_run else open_store(runs)
    found: Runs = []
    if not fresh or requeued is not None:
        found, unreadable = store.runs()
        options.warn_skipped(unreadable)
    if fresh and requeued is not None:
        found = [run for run in found if made_in_job(run[1], requeued)]
    return store, found, reusable([record for _, record in found], lambda _: True)


def _require_equal_batches(
    batch: str, resumes: bool, given: options.GivenFiles, *, adds_rounds: bool
) -> None:
    """Raise HarnessError for what decides batches by itself next to --batch largest."""
    other = "--resume-from" if resumes else "a file of settings" if given.count else None
    other = "--within or --max-minutes" if adds_rounds else other
    if batch == "largest" and other is not None:
        raise HarnessError(f"--batch largest and {other} exclude each other; leave one out")


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a comparison adds, shows and writes when its cells have run."""

    until: Until
    report: Path | None
    asked: CompareSection
    as_json: bool
    strict: bool
    view: View

    def finish(
        self, made: MissingCells | Scripts, planned: Callable[[int], Sequence[Any]],
        known: Mapping[str, Record], records: Sequence[Record],
    ) -> int:  # fmt: skip
        """Add rounds, show all; the exit code."""
        if self.until != Until():
            records = add_rounds(planned, made, known, records, self.until, self.view)
        files = {id(record): path for path, record in made.found}
        runs = [(files.get(id(record), made.store.record_path(record)), record) for record in records]
        try:
            comparison = self._show(runs)
        except (HarnessError, OSError):
            raise
        except Exception:  # a record of which nothing can be shown is passed over by name
            from harness.tell.report import without_odd_runs

            sound, odd = without_odd_runs(runs, self._trial)
            options.warn_skipped(odd)
            comparison = self._show(sound)
        if made.interrupted:
            return options.EXIT_INTERRUPTED
        is_bad = any(
            row.record.status not in ("ok", "unsupported")
            or row.judgement.parity == "diverged"
            or row.judgement.not_same_job
            for row in comparison.rows
        )
        return options.EXIT_STRICT if self.strict and is_bad else 0

    def _show(self, runs: Runs) -> Comparison:
        from harness.tell.terminal import where_to_read

        comparison, table, document = self._texts(runs)
        if self.report is not None:
            self._write(runs, self.report)
        # With --json a person reads the table, a program the document.
        echo(table, err=self.as_json)
        if self.as_json:
            echo(document)
        for line in where_to_read(comparison):
            self.view.say(line)
        if self.report is not None:
            self.view.say(f"report: {self.report}")
        return comparison

    def _texts(self, runs: Runs) -> tuple[Comparison, str, str]:
        """The comparison, its table and its document."""
        from harness.judge.comparison import Comparison
        from harness.tell.terminal import terminal_text

        comparison = Comparison(record for _, record in runs)
        document = comparison.as_json() | {"records": [str(path) for path, _ in runs]}
        return comparison, terminal_text(comparison, wide=self.view.wide), json.dumps(document, indent=1)

    def _trial(self, runs: Runs) -> object:
        from harness.tell.report import prepare_report

        return self._texts(runs), self.report and prepare_report(runs, self.report)

    def _write(self, runs: Runs, report: Path) -> None:
        """Write the report with a folder of its own records next to it: later runs do not concern it."""
        from harness.tell.manifest import Asked
        from harness.tell.report import write_report

        asked: Asked = {"question": self.asked.question, "price": self.asked.price_per_gpu_hour}
        if stream_number(report) is None:
            folder = report.with_name(report.name + RECORDS_SUFFIX)
            runs, asked = keep_runs(runs, folder), {**asked, "folders": [folder]}
        write_report(runs, report, **asked)
