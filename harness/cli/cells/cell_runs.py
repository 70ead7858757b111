"""Runs the missing cells of a comparison, next to other comparisons on the same folder."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.cells.preflight import predict_cells, say_repeated, say_whole, show
from harness.cli.options.arguments import command_line
from harness.cli.terminal.output import View, echo
from harness.cli.terminal.progress import MatrixProgress
from harness.job.batch import BatchLayout
from harness.job.experiment import Experiment
from harness.judge.cell import CellName
from harness.launch.cells import Cell, is_refused, with_same_split
from harness.launch.external import OthersRecords, claimed, forget_dead_claims
from harness.launch.launcher import LocalLauncher, modules_to_preload, running_cell
from harness.launch.owner import forget_never_begun, record_abandoned
from harness.launch.turns import AUTO, groups, take_turns
from harness.record import Record
from harness.record.provenance import environment
from harness.record.store import Store

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
        self, cells: Sequence[Cell], known: Mapping[str, Record], batches: LargestBatches | None
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

    def run(self, cells: Sequence[Cell], known: Iterable[Record]) -> dict[str, Record]:
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
        self, launcher: LocalLauncher, group: Sequence[Cell], others: OthersRecords,
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

    def _made_by_another(self, others: OthersRecords, cell: Cell) -> Record | None:
        found = None if self._fresh else others.of_cell(cell.key)
        if found is None:
            return None
        self.files[id(found[1])] = found[0]
        return found[1]

    def _run(
        self, launcher: LocalLauncher, cells: Sequence[Cell], others: OthersRecords,
        predicted: CellPredictions, progress: MatrixProgress,
    ) -> Generator[tuple[str, Record]]:  # fmt: skip
        """The record of each cell as it ends: of one alone, or of several that take turns."""
        by_key, are_several = {cell.key: cell for cell in cells}, len(cells) > 1
        runs = {
            key: running_cell(
                cell, self._experiment, self._store, launcher, command=command_line(), on_event=progress,
                prediction=predicted.parts.get(key), refusal=predicted.refusal(key), takes_turns=are_several,
            )
            for key, cell in by_key.items()
        }  # fmt: skip
        with closing(take_turns(runs, self._turns or 1, lambda key: progress.begin(by_key[key]))) as ends:
            for key, record in ends:
                path = self.files[id(record)] = self._store.record_path(record)
                others.is_own(path)
                yield key, record


def largest_batches(cells: Sequence[Cell], experiment: Experiment, device: str) -> LargestBatches:
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


def forget_refused(store: Store, records: Sequence[Record], cells: Sequence[Cell]) -> None:
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
