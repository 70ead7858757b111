"""`harness compare -- SCRIPT`: a script of the user's own under each strategy, or several as they are."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.backends import registry
from harness.cli.options import command_line
from harness.cli.output import View
from harness.errors import HarnessError
from harness.exported.folder import exported_strategy
from harness.exported.scripts import VARIABLES, accelerate_launch, strategy_name, variables, why_not
from harness.job.config import load_experiment
from harness.job.experiment import Experiment, MeasureSection
from harness.judge.wording import a_few, counted
from harness.launch.cells import canonical_label
from harness.launch.observed_command import RowLaunch, files_of, observe_row
from harness.nested import differences
from harness.record import Record
from harness.record.provenance import code_fingerprint, machine_name, package_versions
from harness.record.store import Store
from harness.run_directory.observed_record import ScriptRow
from harness.tell.formats import fitted

WINDOWS = {"warmup_steps": 3, "probed_steps": 2, "cooldown_steps": 3}
"""Settings of an observed run, with their defaults."""
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed")
BASE = "ddp"


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
        return f"{self.backend}, moved" if self.is_moved else self.backend


@dataclass(kw_only=True)
class Scripts:
    """The rows of a comparison, and the runs of those that are missing.

    rows: by name, the words of the script or of a whole command, the base first: others are compared with it,
    and given its clipping, precision and batch. is_given: whether Accelerate is told the strategy of a row.
    """

    rows: Mapping[str, tuple[str, ...]]
    is_given: bool
    world_size: int
    device: str
    experiment: Experiment
    store: Store
    view: View
    files: dict[int, Path]
    """The file of each record by the id of the object."""
    interrupted: bool = False
    base: Record | None = None

    def plan(self, rounds: int) -> list[ScriptCell]:
        """In rounds; every second one has the rows behind the base in reverse, as other comparisons.

        The base runs once more, its weights moved to the next number: that measures rounding. ZeRO, which
        keeps weights of its own, is not moved.
        """
        names = list(self.rows)
        cells = []
        for repeat in range(rounds):
            order = names if repeat % 2 == 0 else [*names[:1], *names[:0:-1]]
            cells += [self._cell(name, repeat) for name in order]
        is_zero = self.is_given and exported_strategy(names[0]).zero_stage is not None
        if self.experiment.compare.noise_runs and len(names) > 1 and not is_zero:
            cells.insert(1, self._cell(names[0], 0, is_moved=True))
        return cells

    def _cell(self, name: str, repeat: int, *, is_moved: bool = False) -> ScriptCell:
        words = self.rows[name]
        parts = {
            "row": [name, is_moved],
            "words": words,
            "files": files_of(words),
            "given": [self.world_size, self.device, self.experiment.runtime.preset]
            if self.is_given
            else None,
            "measure": self.experiment.measure.model_dump(),
            "repeat": repeat,
            "code": code_fingerprint(),
            "packages": package_versions(PACKAGES),
            "machine": machine_name(),
        }
        return ScriptCell(
            backend=name, words=words, repeat=repeat,
            key=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16],
            job_id=self.base.job_id if self.base else "", world_size=self.world_size, is_moved=is_moved,
        )  # fmt: skip

    def records(self, cells: Sequence[ScriptCell], known: Mapping[str, Record]) -> list[Record]:
        """The records of all cells, as far as they ran, the missing ones run now."""
        done = dict(known)
        done |= self.run(
            [cell for cell in cells if cell.key not in done], [done[c.key] for c in cells if c.key in done]
        )
        return [done[cell.key] for cell in cells if cell.key in done]

    def run(self, cells: Sequence[ScriptCell], known: Iterable[Record]) -> dict[str, Record]:
        """Records by cell. `known`: records of other cells of the comparison."""
        first = next(iter(self.rows))
        for record in known:
            if record.backend.label == first and record.status == "ok":
                self.base = self.base or record
        done: dict[str, Record] = {}
        for number, cell in enumerate(cells, 1):
            what = "weights moved by a unit" if cell.is_moved else f"round {cell.repeat + 1}"
            self.view.say(f"{number} of {len(cells)}: {cell.backend}, {what}")
            record = self._run(cell)
            done[cell.key] = record
            self.files[id(record)] = self.store.record_path(record)
            if record.status == "ok" and not cell.is_moved:
                self.base = self.base or record
            self.interrupted = record.was_interrupted
            steps = counted(len(record.steps), "step")
            why = record.error.message if record.error else "; ".join(record.reasons)
            self.view.say(f"{cell.backend}: {record.status}, {why or steps}")
            if self.interrupted:
                break
        return done

    def _run(self, cell: ScriptCell) -> Record:
        base, device, size = self.base, self.device, self.world_size
        row = ScriptRow(
            label=cell.label,
            key=cell.key,
            repeat=cell.repeat,
            job_id=base.job_id if base else None,
            judged_by=next(iter(self.rows)),
            is_moved=cell.is_moved,
        )
        launch = RowLaunch(script=cell.words, world_size=size, device=device, base=base)
        if self.is_given:
            preset = registry.preset_of(cell.backend, self.experiment.runtime.preset)
            row = row.model_copy(update={"preset": preset, "strategy": strategy_name(cell.backend)})
            launch = replace(
                launch, variables=variables(cell.backend, device), without=VARIABLES,
                why_not=why_not(cell.backend, size, device),
                launcher=lambda folder: accelerate_launch(
                    cell.backend, folder, base, world_size=size, device=device, preset=preset
                ),
            )  # fmt: skip
        experiment = self.experiment
        return observe_row(row, launch, self.store, experiment.measure, experiment.runtime, command_line())


def strategy_rows(script: Sequence[str], labels: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The same script under each strategy, the base first. Raises HarnessError."""
    words = tuple(script[1:] if Path(script[0]).name in ("python", "python3") else script)
    if not words or Path(words[0]).name in LAUNCHERS:
        raise HarnessError(
            f"`-- {shlex.join(script)}` names a launcher; give the script and its arguments, which each row "
            "starts under its strategy, or whole commands with --script NAME=COMMAND"
        )
    if not Path(words[0]).is_file():
        raise HarnessError(
            f"script '{words[0]}' does not exist; `--` is followed by a Python file and its arguments"
        )
    names = [canonical_label(label) for label in labels]
    for name in names:
        strategy_name(name)
    return dict.fromkeys(sorted(names, key=lambda name: name != BASE), words)


def require_script_alone(experiment: Experiment, **given: Any) -> None:
    """Raise HarnessError for what a script decides itself. given: options by name, and whether they are."""
    default, asked = load_experiment(None, ()).job(), experiment.job()
    named = [".".join(keys) for keys, _, _ in differences(default.model_dump(), asked.model_dump())]
    named += [f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given]
    if named:
        raise HarnessError(f"{a_few(named)} would be ignored: the script decides; leave it out")


def observed_measure(measure: MeasureSection) -> MeasureSection:
    """The windows of an observed run, those that were set as they are."""
    default = MeasureSection()
    own = {name: steps for name, steps in WINDOWS.items() if getattr(measure, name) == getattr(default, name)}
    return measure.model_copy(update=own | {"traced_steps": 0, "weight_digests": False})


def plan_lines(cells: Sequence[ScriptCell], known: Mapping[str, Record], view: View) -> str:
    """What would run, row by row."""
    rows = [
        [
            cell.label,
            str(cell.repeat),
            known[cell.key].run_id if cell.key in known else "none",
            shlex.join(cell.words),
        ]
        for cell in cells
    ]
    return fitted(rows, ("row", "repeat", "record", "command"), wide=view.wide)


def named_rows(scripts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """'NAME=COMMAND' each; the first is the base. Raises HarnessError."""
    rows: dict[str, tuple[str, ...]] = {}
    for given in scripts:
        name, equals, command = given.partition("=")
        words: tuple[str, ...] = ()
        with suppress(ValueError):  # a quotation that does not end
            words = tuple(shlex.split(command))
        if not (name.isidentifier() and equals and words) or name in rows:
            raise HarnessError(
                f"--script was given '{given}'; give NAME=COMMAND with a name of its own, such as "
                "a='torchrun --nproc-per-node 2 train.py'"
            )
        rows[name] = words
    return rows
