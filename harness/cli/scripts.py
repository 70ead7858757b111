"""`harness compare -- SCRIPT`: a script of the user's own under each strategy, or several as they are."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from harness.cli.options import MODES, GivenFiles, command_line, split_backends
from harness.cli.output import View, echo
from harness.errors import HarnessError
from harness.exported.scripts import (
    VARIABLES,
    StrategyFile,
    accelerate_launch,
    of_accelerate,
    preset_of,
    strategy_name,
    variables,
    why_not,
)
from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from harness.judge.wording import a_few, counted, listed
from harness.launch.cells import canonical_label, cell_key, reusable
from harness.launch.observed_command import RowLaunch, files_of, observe_row
from harness.nested import differences
from harness.record import Record
from harness.record.provenance import code_fingerprint, machine_name, package_versions
from harness.record.store import Store, keep_record
from harness.run_directory.observed_record import MOVED, PREFIX, ScriptRow
from harness.run_directory.request import launcher_log
from harness.safe_text import without_passwords
from harness.tell.formats import fitted

IGNORED = ("threads_per_rank", "memory_limit", "loading")
"""Settings of `runtime` that a script does not have."""
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed")
BASE = "ddp"
UNMOVED = (f"{PREFIX}zero", f"{PREFIX}script")
"""Where weights are not moved: ZeRO keeps masters beside them, and of others no strategy was seen."""
REFERENCE_ROW = "one-process"
"""Of the command that is given as reference."""


@dataclass(frozen=True, kw_only=True)
class ScriptCell:
    """One run of one row."""

    backend: str
    """Name of the row: a strategy, or what the user called the script."""
    words: tuple[str, ...]
    repeat: int
    key: str
    job_id: str
    """'' until a row has trained."""
    world_size: int
    is_moved: bool = False
    """Whether it only measures what rounding changes."""

    @property
    def label(self) -> str:
        return self.backend + MOVED * self.is_moved


@dataclass(kw_only=True)
class Scripts:
    """The rows of a comparison, and the runs of those that are missing.

    rows: by name, the words of the script or of a whole command. Others are compared with the first that
    trains, the base, and given its clipping, precision and batch. is_given: whether Accelerate is told the
    strategy of each row but the reference's.
    """

    rows: Mapping[str, tuple[str, ...]]
    is_given: bool
    world_size: int
    device: str
    experiment: Experiment
    store: Store
    view: View
    found: Sequence[tuple[Path, Record]]
    given: Mapping[str, StrategyFile] = field(default_factory=dict)
    """By row, the file that it is given as it is."""
    interrupted: bool = False
    seen: dict[str, Record] = field(default_factory=dict)
    """The first run of each row that trained."""
    lost: set[str] = field(default_factory=set)
    """The rows that ran before they trained."""
    files: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)
    """Digests by words, read once for a plan."""

    @property
    def _judge(self) -> str:
        """The row that others are judged by: the first that trained, now or when their records were made."""
        first = next(iter(self.seen.values()), None)
        if first is None:
            return next(iter(self.rows))
        judge = first.observation.judged_by if first.observation else None
        return judge if judge and judge in self.rows and judge not in self.lost else first.backend.label

    @property
    def base(self) -> Record | None:
        """Record of that row; None: it has not run yet, or runs again, its script having changed."""
        return self.seen.get(self._judge)

    def _size(self, name: str) -> int:
        return 1 if name == REFERENCE_ROW else self.world_size

    def plan(self, rounds: int) -> list[ScriptCell]:
        """In rounds; every second one has the rows behind the base in reverse, as other comparisons.

        The base runs once more, its weights moved to the next number: that measures rounding.
        """
        self.files.clear()
        names = list(self.rows)
        cells = []
        for repeat in range(rounds):
            order = names if repeat % 2 == 0 else [*names[:1], *names[:0:-1]]
            cells += [self._cell(name, repeat) for name in order]
        keys = {cell.key for cell in cells}
        for _, record in self.found:
            if record.cell in keys:
                self._note(record)
        lasting = reusable([record for _, record in self.found], keys.__contains__)
        self.lost |= {record.backend.label for record in lasting.values()} - self.seen.keys()
        if self.experiment.compare.noise_runs and len(names) > 1:
            cells.insert(names.index(self._judge) + 1, self._cell(self._judge, 0, is_moved=True))
        return cells

    def _files(self, words: tuple[str, ...]) -> dict[str, str]:
        if words not in self.files:
            self.files[words] = files_of(words)
        return self.files[words]

    def _cell(self, name: str, repeat: int, *, is_moved: bool = False) -> ScriptCell:
        words, known = self.rows[name], self.seen.get(name)
        read = (*words, *([str(self.given[name].path)] if name in self.given else []))
        given = [self._size(name), self.device, self.experiment.runtime.preset]
        parts = {
            "row": [name, is_moved], "base": next(iter(self.rows)), "words": words,
            "files": self._files(read), "folder": str(Path.cwd()),
            "given": given if self.is_given else None, "repeat": repeat,
            "measure": self.experiment.measure.model_dump(), "code": code_fingerprint(),
            "packages": package_versions(PACKAGES), "machine": machine_name(),
        }  # fmt: skip
        return ScriptCell(
            backend=name, words=words, repeat=repeat,
            key=cell_key(json.dumps(parts, sort_keys=True)),
            job_id=self.base.job_id if self.base else "",
            world_size=known.world.world_size if known else self._size(name), is_moved=is_moved,
        )  # fmt: skip

    def records(self, cells: Sequence[ScriptCell], known: Mapping[str, Record]) -> list[Record]:
        """The records of all cells, as far as they ran, the missing ones run now."""
        done = {cell.key: known[cell.key] for cell in cells if cell.key in known}
        if done:
            self.view.say(f"{len(done)} of {len(cells)} runs have a record; --fresh runs them again")
        done |= self.run([cell for cell in cells if cell.key not in done], ())
        places = {cell.key: place for place, cell in enumerate(cells)}
        records = sorted(done.values(), key=lambda record: places.get(record.cell, 0))
        return [self._of_base(record) for record in records]

    def run(self, cells: Sequence[ScriptCell], _known: Iterable[Record]) -> dict[str, Record]:
        """Records by cell."""
        done: dict[str, Record] = {}
        waiting = [cell for cell in cells if not cell.is_moved]
        moves = len(waiting) < len(cells)
        for name in dict.fromkeys(cell.backend for cell in waiting):
            if why := self._why_not(name):
                self.view.say(f"{name}: unsupported, {why}")
        while waiting or (moves and self.base):
            if moves and self.base:
                moves = False
                if self.base.backend.name.startswith(UNMOVED):
                    continue
                cell = self._cell(self.base.backend.label, 0, is_moved=True)
            else:
                cell = waiting.pop(0)
            number = len(cells) - len(waiting) - moves
            what = "weights moved by a unit" if cell.is_moved else f"round {cell.repeat + 1}"
            self.view.say(f"{number} of {len(cells)}: {cell.backend}, {what}")
            record = done[cell.key] = self._run(cell)
            self._note(record)
            if cell.backend not in self.seen and not record.was_interrupted:
                self.lost.add(cell.backend)
            if self.base is record and cell.backend == next(iter(self.seen)) != next(iter(self.rows)):
                self.view.say(f"{cell.backend} is the base: no row before it trained")
            why = record.error.message if record.error else "; ".join(record.reasons)
            is_base = self.is_given and cell.backend == next(iter(self.rows)) and not self.seen
            if is_base and record.status == "failed" and not (record.steps or "OutOfMemoryError" in why):
                raise HarnessError(self._stopped(cell, record, why))
            steps = counted(len(record.steps), "step")
            self.view.say(f"{cell.backend}: {record.status}, {why or steps}")
            if record.was_interrupted:
                self.interrupted = True
                break
        return done

    def _stopped(self, cell: ScriptCell, record: Record, why: str) -> str:
        """Why no other row runs: before its first step a script fails under all strategies alike."""
        own = {name for option in click.get_current_context().command.params for name in option.opts}
        words = dict.fromkeys(word.partition("=")[0] for word in cell.words)
        strays = [word for word in words if word in own and word in why]
        log = launcher_log(self.store.record_path(record).parent)
        went = f"; given to the script, since after `--`: {listed(strays)}" if strays else ""
        return f"{cell.backend}, the base, failed: {why}{went}; no other row runs; log: {log}"

    def _of_base(self, record: Record) -> Record:
        """The record, rewritten as one of the base's job where it was made before there was a base."""
        if self.base is None or record.observation is None:
            return record
        seen = record.observation.model_copy(update={"judged_by": self.base.backend.label})
        if record.job_id == self.base.job_id and record.observation == seen:
            return record
        own: dict[str, object] = {} if record.ranks else {"world": self.base.world, "job": self.base.job}
        own |= {"job_id": self.base.job_id, "observation": seen}
        return keep_record(self.store.record_path(record).parent, record.model_copy(update=own))

    def _note(self, record: Record) -> None:
        if record.status == "ok" and not (record.observation and record.observation.is_moved):
            self.seen.setdefault(record.backend.label, record)

    def _given(self, name: str) -> str | None:
        """The strategy that Accelerate is told for a row; None: none."""
        if not self.is_given or name == REFERENCE_ROW:
            return None
        return self.given[name].strategy if name in self.given else name

    def _why_not(self, name: str) -> str | None:
        label = self._given(name)
        return label and why_not(label, self._size(name), self.device)

    def _run(self, cell: ScriptCell) -> Record:
        base, device, runtime = self.base, self.device, self.experiment.runtime
        size = self._size(cell.backend)
        row = ScriptRow(
            label=cell.label, key=cell.key, repeat=cell.repeat, job_id=base.job_id if base else None,
            judged_by=base.backend.label if base else cell.backend,
            is_moved=cell.is_moved,
        )  # fmt: skip
        launch = RowLaunch(script=cell.words, world_size=size, device=device, base=base)
        if label := self._given(cell.backend):
            file = self.given.get(cell.backend)
            preset = "library-defaults" if file else preset_of(label, runtime.preset)
            row = row.model_copy(update={"preset": preset, "strategy": strategy_name(label)})
            launch = replace(
                launch, variables=variables(label, device), without=VARIABLES,
                launcher=lambda folder: accelerate_launch(
                    label, folder, base, file, world_size=size, device=device, preset=preset),
            )  # fmt: skip
        return observe_row(row, launch, self.store, self.experiment.measure, runtime, command_line())

    def show(self, cells: Sequence[ScriptCell], known: Mapping[str, Record], *, as_json: bool) -> None:
        """What would run, row by row."""
        runs = {key: record.run_id for key, record in known.items()}
        names = ("row", "repeat", "record", "command")
        if as_json:
            rows = [(c.label, c.repeat, runs.get(c.key), c.words, self._why_not(c.backend)) for c in cells]
            named = [dict(zip((*names, "unsupported"), row, strict=True)) for row in rows]
            echo(json.dumps({"cells": named}, indent=1))
            return
        shown = [
            [c.label, str(c.repeat), runs.get(c.key) or self._why(c), shlex.join(c.words)] for c in cells
        ]
        echo(fitted(shown, names, wide=self.view.wide))

    def _why(self, cell: ScriptCell) -> str:
        """Why no record stands for a cell: it cannot run, or what differs from the newest run of its row."""
        if why := self._why_not(cell.backend):
            return f"unsupported: {why}"
        ran = [(r, r.observation) for _, r in self.found if r.backend.label == cell.label and r.observation]
        if not ran:
            return "none: never ran in this folder"
        last, seen = max(ran, key=lambda one: (one[0].cell == cell.key, one[0].created_at))
        if last.cell == cell.key:
            return f"none: the last run is {last.status}"
        then = {"command": seen.command, "repeat": last.repeat, **seen.files}
        now = {"command": without_passwords(cell.words), "repeat": cell.repeat, **self._files(cell.words)}
        changed = [keys[0] for keys, _, _ in differences(then, now)]
        others = "ranks, a setting, a version, the folder, or a file given"
        return f"none: the newest differs in {a_few(changed) or others}"


def strategy_rows(
    script: Sequence[str], backends: str | None, sizes: Sequence[int], files: Sequence[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Commands of a script under each strategy, the base first, and under `files`. Raises HarnessError."""
    words = tuple(script)
    if Path(words[0]).resolve() == Path(sys.executable).resolve() or words[0] in ("python", "python3"):
        words = words[1:]
    if not words or Path(words[0]).name in LAUNCHERS or Path(words[0]).name.startswith("python"):
        raise HarnessError(
            f"`-- {shlex.join(script)}` names a launcher or another Python; give the script and its "
            "arguments, which each row starts under its strategy, or commands with --script NAME=COMMAND"
        )
    if not Path(words[0]).is_file():
        raise HarnessError(
            f"script '{words[0]}' is not a file; give a Python file and its arguments after `--`, names with "
            "--backends; `harness report RUNS -o FILE` compares runs that were made"
        )
    if len(sizes) > 1:
        raise HarnessError(
            f"{listed([*map(str, sizes)])} ranks were asked for; a script takes one number (--nproc)"
        )
    names = [BASE] if files else of_accelerate()
    names = [canonical_label(label) for label in split_backends(backends)] if backends else names
    for name in names:
        strategy_name(name)
    if twice := [name for name in files if [*names, *files].count(name) > 1]:
        raise HarnessError(f"two rows would be named '{twice[0]}'; rename the file of one")
    return dict.fromkeys([*sorted(names, key=lambda name: name != BASE), *files], words)


def asked_rows(
    experiment: Experiment, words: Sequence[str], scripts: Sequence[str], given: GivenFiles,
    sizes: Sequence[int], *, backends: str | None, nproc: str | None, reference: str | None, **others: object,
) -> tuple[dict[str, tuple[str, ...]], dict[str, StrategyFile]]:  # fmt: skip
    """The rows, and by name the file that one is given. others: options by name, with their values.

    Raises HarnessError, also for set `others`, which the script decides itself.
    """
    if words and scripts:
        raise HarnessError("`-- SCRIPT` and --script exclude each other; leave one out")
    default, asked = load_experiment(None, ()), experiment
    named = [".".join(k) for k, _, _ in differences(default.job().model_dump(), asked.job().model_dump())]
    named += [f"runtime.{n}" for n in IGNORED if getattr(default.runtime, n) != getattr(asked.runtime, n)]
    if scripts or given.mode != MODES[0]:
        others |= {"from_mode": given.count > 0}
    others |= {"backends": backends, "nproc": nproc, "reference": reference} if scripts else {}
    named += [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    if named:
        raise HarnessError(f"{a_few(named)} would be ignored: the script decides; leave it out")
    if scripts:
        return named_rows(scripts), {}
    files = [StrategyFile.read(path, "accelerate") for path in given.accelerate]
    files += [StrategyFile.read(path, "deepspeed") for path in given.deepspeed]
    names = [file.path.stem for file in files]
    rows = strategy_rows(words, backends, sizes, names)
    if reference is not None:
        rows[REFERENCE_ROW] = _words(reference)
        if not rows[REFERENCE_ROW]:
            raise HarnessError(
                f"--reference was given '{reference}'; give a command, such as 'python train.py --batch 8'"
            )
    return rows, dict(zip(names, files, strict=True))


def of_script(experiment: Experiment) -> Experiment:
    """Experiment of a script, which is not traced and whose weights are not gathered."""
    measure = experiment.measure.model_copy(update={"traced_steps": 0, "weight_digests": False})
    return experiment.model_copy(update={"measure": measure})


def named_rows(scripts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """'NAME=COMMAND' each; the first is the base. Raises HarnessError."""
    rows: dict[str, tuple[str, ...]] = {}
    for given in scripts:
        name, equals, command = given.partition("=")
        words = _words(command)
        if not (name.isidentifier() and equals and words) or name in rows:
            raise HarnessError(
                f"--script was given '{given}'; give NAME=COMMAND with a name of its own "
                "(letters, digits and _), such as a='torchrun --nproc-per-node 2 train.py'"
            )
        rows[name] = words
    return rows


def _words(command: str) -> tuple[str, ...]:
    """(): a quotation does not end."""
    with suppress(ValueError):
        return tuple(shlex.split(command))
    return ()
