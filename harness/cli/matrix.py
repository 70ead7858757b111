"""What cells will need in memory, shown before they start."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.bounds import MOST_REPEATS
from harness.cli.options import command_line
from harness.cli.output import View, echo
from harness.cli.progress import MatrixProgress
from harness.errors import HarnessError
from harness.job.batch import BatchLayout
from harness.job.experiment import Experiment
from harness.judge.wording import CellName, counted, listed, ranks
from harness.launch import external_rank
from harness.launch.cells import is_refused, with_same_split
from harness.launch.external import OthersRecords, claimed, forget_dead_claims
from harness.launch.launcher import AUTO, LocalLauncher, groups, modules_to_preload, running_cell, take_turns
from harness.launch.owner import forget_never_begun, record_abandoned
from harness.record import PredictionPart, Record
from harness.record.provenance import environment
from harness.record.store import Store
from harness.run_directory.request import RunRequest

if TYPE_CHECKING:
    from harness.plan.preflight import CellPredictions

force_option = click.option("--force", is_flag=True, help="Start runs that are predicted not to fit.")


def predict_cells(
    cells: Sequence[RunRequest],
    facts: Mapping[str, dict[str, Any]],
    experiment: Experiment,
    launcher: LocalLauncher,
    *,
    force: bool,
) -> CellPredictions:
    """Predict cells that are about to run on this machine.

    `facts`: by job id, what the check of the job returned.
    """
    from harness.plan.limits import limits_here
    from harness.plan.preflight import of_cells, predict_runs

    runtime = experiment.runtime
    limits = limits_here(launcher.device, runtime.memory_limit)
    candidates = of_cells(cells, facts, launcher.device, limits)
    return predict_runs(candidates, limits, force=force, trace=launcher.trace)


def predict_unchecked(
    cells: Sequence[RunRequest], device: str, memory_limit: int | None, *, force: bool
) -> CellPredictions:
    """The same for cells of jobs that nobody checked, from their configurations alone."""
    from harness.plan.limits import limits_here
    from harness.plan.preflight import of_cells, predict_runs

    limits = limits_here(device, memory_limit)
    return predict_runs(of_cells(cells, {}, device, limits), limits, force=force)


def predict_one(
    cell: RunRequest, facts: dict[str, Any], experiment: Experiment, launcher: LocalLauncher, *, force: bool,
    shows: bool = True,
) -> PredictionPart | None:  # fmt: skip
    """The same for one cell, and show it if `shows`. Raises HarnessError if it cannot fit."""
    predicted = predict_cells([cell], {cell.job_id: facts}, experiment, launcher, force=force)
    if (refusal := predicted.refusal(cell.key)) is not None:
        raise HarnessError(f"{cell.backend} on {ranks(cell.world_size)}: {refusal}")
    if shows:
        show(predicted)
        say_whole([facts], experiment)
        say_repeated([facts], [cell])
    return predicted.parts.get(cell.key)


def refuse_as_rank(request: RunRequest, *, force: bool) -> None:
    """Raise HarnessError if the ranks of this node, one of which this process is, cannot fit.

    One rank of a node asks, before it meets the others: they wait for it and hold nothing yet.
    """
    from harness.plan.limits import limits_here
    from harness.plan.preflight import of_requests, predict_runs

    limits = limits_here(request.device, request.memory_limit_bytes)
    refusal = predict_runs(of_requests([request], limits), limits, force=force).refusal(request.run_id)
    if refusal is not None:
        problem = f"{request.backend} on {ranks(request.world_size)}: {refusal}"
        if external_rank() != 0:  # the first rank of all shows its own error
            echo(f"harness: {problem}", err=True)
        raise HarnessError(problem)


def say_whole(facts: Iterable[Mapping[str, Any]], experiment: Experiment) -> None:
    """Why ranks of a strategy that shards weights build the model whole, on standard error."""
    loading = experiment.runtime.loading
    reasons = {found["model"].get("whole_because") for found in facts} if loading == "slices" else set()
    if loading == "broadcast" and experiment.model.factory is not None:
        reasons = {"a model of model.factory has no broadcast; runtime.loading=slices builds it whole once"}
    for reason in sorted(reasons - {None}):
        echo(f"loading: full (every rank builds the whole model): {reason}", err=True)


def say_repeated(facts: Iterable[Mapping[str, Any]], cells: Sequence[RunRequest]) -> None:
    """That batches repeat samples, where there are fewer than one batch takes; on standard error."""
    samples = min((found["data"]["training_samples"] for found in facts), default=0)
    batch = max(cell.layout.global_batch_size for cell in cells)
    if samples < batch:
        echo(
            f"data: {samples} training samples are less than a global batch of {batch}: each repeats some",
            err=True,
        )


def show(predicted: CellPredictions) -> None:
    """The predictions on standard error."""
    for line in predicted.lines():
        echo(line, err=True)


if TYPE_CHECKING:
    from harness.plan.fit import LargestBatches
    from harness.plan.preflight import CellPredictions


SPLIT = (
    "the loss depends on how the batch is split: the reference runs again with as many samples at once as "
    "the ranks take"
)


def _get_ready() -> None:
    """Do once what would otherwise be done between two runs: imports, and asking git for the code's state."""
    for name in ("harness.plan.limits", "harness.judge.comparison", "harness.tell.terminal"):
        import_module(name)
    environment()


class MissingCells:
    """Runs cells; what ran before an interruption is kept.

    Those that are predicted not to fit get a record that says so, unless `force`. `rounds`: how many are
    asked; None: until speeds are settled.
    """

    def __init__(
        self,
        store: Store,
        experiment: Experiment,
        device: str,
        found: Sequence[tuple[Path, Record]],
        rounds: int | None,
        *,
        fresh: bool,
        force: bool,
        view: View,
    ) -> None:
        self._store = store
        self._view = view
        self._experiment = experiment
        self._device = device
        self._fresh = fresh
        self._force = force
        self._rounds = rounds
        self._said: set[str] = set()
        self._foretold: set[tuple[str, int, str, BatchLayout]] = set()
        self._found = [record for _, record in found]
        self.files = {id(record): path for path, record in found}
        """The file of each record by the id of the object."""
        self.interrupted = False
        self._launcher: LocalLauncher | None = None

    def records(
        self, cells: Sequence[RunRequest], known: Mapping[str, Record], batches: LargestBatches | None
    ) -> list[Record]:
        """The records of all cells, as far as they ran, the missing ones run now.

        `batches`: a cell that is out of memory runs again with the next smaller micro-batch.
        """
        done = dict(known)
        while True:
            ran = [done[cell.key] for cell in cells if cell.key in done]
            done |= self.run([cell for cell in cells if cell.key not in done], ran)
            wanted = cells
            if not self.interrupted:
                asked = batches.after(cells, done) if batches is not None else cells
                wanted = with_same_split(asked, done, self._experiment, self._device)
                if len(wanted) > len(asked):
                    self._view.say(SPLIT)
            if wanted == cells:
                return [done[cell.key] for cell in cells if cell.key in done]
            cells = wanted

    def run(self, cells: Sequence[RunRequest], known: Iterable[Record]) -> dict[str, Record]:
        """Records by cell. `known`: records of other cells of the comparison."""
        done: dict[str, Record] = {}
        if not cells:
            return done
        if self._launcher is None:
            preload = modules_to_preload(self._experiment, [cell.backend for cell in cells])
            self._launcher = LocalLauncher(self._device, preload)
            _get_ready()  # while the fork server imports what ranks need
        launcher = self._launcher
        jobs = {cell.job_id: cell.job for cell in cells}
        facts = {job_id: launcher.check(job.model_dump_json()) for job_id, job in jobs.items()}
        predicted = predict_cells(cells, facts, self._experiment, launcher, force=self._force)
        names = {(cell.backend, cell.world_size, cell.job_id, cell.layout) for cell in cells}
        if not self._view.quiet and not names <= self._foretold:  # further rounds bring no news
            self._foretold |= names
            show(predicted)
            say_whole(facts.values(), self._experiment)
            say_repeated(facts.values(), cells)
        forget_refused(self._store, self._found, cells)
        others = OthersRecords(self._store.root, self.files.values())
        progress = MatrixProgress(len(cells), sys.stderr, self._view)
        unknown = {run.key for runs in predicted.unknown.values() for run in runs}
        try:
            for group in groups(
                cells, self._turns, self._device, predicted.parts, unknown, known, self._say_once
            ):
                with closing(self._records(launcher, group, others, predicted, progress)) as ends:
                    for key, record in ends:
                        done[key] = record
                        progress.end(key, _line(record))
                        self.interrupted |= record.was_interrupted
                if self.interrupted:
                    break
        finally:
            progress.close()
        return done

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._view.say(text)

    @property
    def _turns(self) -> int | None:
        """Timed steps of a turn; None: each cell runs whole."""
        from harness.judge.statistics import interval_runs

        asked = self._experiment.compare.turns
        if asked != "auto":
            return asked
        return AUTO if self._rounds is None or self._rounds >= interval_runs() else None

    def _records(
        self, launcher: LocalLauncher, group: Sequence[RunRequest], others: OthersRecords,
        predicted: CellPredictions, progress: MatrixProgress,
    ) -> Generator[tuple[str, Record]]:  # fmt: skip
        """Each cell of a group with its record, as they end."""
        with ExitStack() as claims:
            missing = {}
            # In one order whatever the plan: who waits for a claim holds none that the other waits for.
            for cell in sorted(group, key=lambda cell: cell.key):
                name = CellName(cell.backend, cell.world_size)
                waiting = f"{name}: another comparison on this folder runs it; waiting for its record"
                claims.enter_context(claimed(self._store.root, cell.key, partial(progress.say, waiting)))
                if (record := self._made_by_another(others, cell)) is not None:
                    yield cell.key, record
                else:
                    missing[cell.key] = cell
            yield from self._run(
                launcher, [cell for cell in group if cell.key in missing], others, predicted, progress
            )

    def _made_by_another(self, others: OthersRecords, cell: RunRequest) -> Record | None:
        found = None if self._fresh else others.of_cell(cell.key)
        if found is None:
            return None
        self.files[id(found[1])] = found[0]
        return found[1]

    def _run(
        self, launcher: LocalLauncher, cells: Sequence[RunRequest], others: OthersRecords,
        predicted: CellPredictions, progress: MatrixProgress,
    ) -> Generator[tuple[str, Record]]:  # fmt: skip
        """The record of each cell as it ends: of one alone, or of several that take turns."""
        by_key, are_several = {cell.key: cell for cell in cells}, len(cells) > 1
        runs = {
            key: running_cell(
                cell, self._store, launcher, command=command_line(), on_event=progress,
                prediction=predicted.parts.get(key), refusal=predicted.refusal(key), takes_turns=are_several,
            )
            for key, cell in by_key.items()
        }  # fmt: skip
        with closing(take_turns(runs, self._turns or 1, lambda key: progress.begin(by_key[key]))) as ends:
            for key, record in ends:
                path = self.files[id(record)] = self._store.record_path(record)
                others.is_own(path)
                yield key, record


def largest_batches(cells: Sequence[RunRequest], experiment: Experiment, device: str) -> LargestBatches:
    """What decides the micro-batches of `compare --batch largest` on this machine.

    Raises HarnessError where ranks have no limit of memory.
    """
    from harness.plan.fit import LargestBatches, require_limit
    from harness.plan.limits import limits_here
    from harness.plan.prediction import Predictors

    limits = limits_here(device, experiment.runtime.memory_limit)
    require_limit(limits)
    launcher = LocalLauncher(device, modules_to_preload(experiment, [cell.backend for cell in cells]))
    jobs = {cell.job_id: cell.job for cell in cells}
    facts = {job_id: launcher.check(job.model_dump_json()) for job_id, job in jobs.items()}
    return LargestBatches(
        experiment=experiment,
        torch_device=device,
        limits=limits,
        facts=facts,
        by=Predictors.traced_by(launcher.trace),
    )


def forget_refused(store: Store, records: Sequence[Record], cells: Sequence[RunRequest]) -> None:
    """Remove earlier records of cells that were not started: they are about to run, or to be judged again."""
    keys = {cell.key for cell in cells}
    for record in records:
        if record.cell in keys and is_refused(record):
            store.discard(record.run_id)


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


if TYPE_CHECKING:
    from harness.judge.statistics import Ratio

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

    def rounds(self, asked: int) -> int | None:
        """How many there will be; None: as many as it takes."""
        return asked if self == Until() else None


def parse_until(within: str | None, minutes: float | None) -> Until:
    """What was asked; minutes count from now on. Raises HarnessError."""
    return Until(
        precision=parse_within(within) if within is not None else None,
        deadline=time.monotonic() + 60 * minutes if minutes is not None else None,
    )


def parse_within(text: str) -> float:
    """'3%' as 0.03. Raises HarnessError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if found is None or not 0 < float(found[1]) < 100:
        raise HarnessError(f"--within was given '{text}'; give half the width of an interval, such as 3%")
    return float(found[1]) / 100


def add_rounds(
    plan: Callable[[int], list[RunRequest]], made: MissingCells, known: Mapping[str, Record],
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
        lost = {*wanted, *bases} & _failing(found.values(), rounds)
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
            open_ = _named(_open(wanted, list(found.values()), until.precision)) or "none"
            view.say(f"no further round after {counted(rounds, 'round')}; open: {open_}")
            break
        rounds += 1
        view.say(f"round {rounds}; open: {_named(wanted)}")
        names = {*wanted, *(base for base in bases if _place(base) in set(map(_place, wanted)))}
        cells = [
            cell
            for cell in plan(rounds)
            if cell.repeat == rounds - 1 and (cell.job_id, cell.backend, cell.world_size) in names
        ]
        taken = {cell.key: known[cell.key] for cell in cells if cell.key in known}
        found |= taken
        # Who joins a round that lies before others is not compared with it.
        newest = max((record.repeat for record in known.values() if _name(record) in names), default=0)
        if not taken or rounds > newest:
            found |= made.run([cell for cell in cells if cell.key not in found], found.values())
        longest = max(longest, time.monotonic() - began)
    return list(found.values())


def _open(wanted: Container[Name], records: Sequence[Record], precision: float | None) -> dict[Name, Ratio]:
    """Those that the report will show as open, or less precise than asked."""
    return {
        name: ratio
        for name, ratio in _compared(records)[0].items()
        if name in wanted and (ratio.order == "open" or (precision and not ratio.is_settled(precision)))
    }


def _name(record: Record) -> Name:
    return record.job_id, record.backend.label, record.world.world_size


def _place(name: Name) -> tuple[str, int]:
    return name[0], name[2]


def _failing(records: Iterable[Record], rounds: int) -> set[Name]:
    """Cells without a result in the last two of so many rounds."""
    last = [record for record in records if record.repeat >= rounds - 2]
    return {_name(record) for record in last} - {_name(r) for r in last if r.status in ("ok", "diverged")}


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
    """'fsdp on 2 (0.81, 0.61 to 1.03) and zero3 on 2'."""
    return listed([f"{label} on {size}{_words(ratio)}" for (_, label, size), ratio in cells.items()])


def _words(ratio: Ratio | None) -> str:
    """' (0.81, 0.61 to 1.03)'; empty while there are too few rounds, and of a base."""
    if ratio is None or ratio.extent is None or ratio.middle is None:
        return ""
    return f" ({ratio.middle:.2f}, {ratio.extent.low:.2f} to {ratio.extent.high:.2f})"
