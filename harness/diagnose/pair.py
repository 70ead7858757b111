"""The two runs of a diagnosis: read from the given paths, refused if they cannot be compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from harness.backends.refusals import suggestion
from harness.errors import HarnessError
from harness.judge.agreement.job_equivalence import first_step
from harness.judge.agreement.parity import has_dropout
from harness.judge.rows import reason
from harness.judge.wording import CellName
from harness.launch.cells import canonical_label
from harness.record import Record
from harness.record.store import archive_of, place_of_runs, read_runs


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A finished run and where its record lies."""

    path: Path
    record: Record
    place: str = ""
    """'first' or 'second' as given, where the other run has the same label and ranks."""

    @property
    def name(self) -> str:
        """'ddp on 2 ranks', or 'ddp on 2 ranks (first)'."""
        return f"{CellName.of(self.record)}" + (f" ({self.place})" if self.place else "")

    @property
    def is_script(self) -> bool:
        """Whether it is an observed script, which nothing can run again from its record."""
        return self.record.observation is not None


def one_job(first: LoadedRun, second: LoadedRun) -> bool:
    """Whether both trained one job; of a script only a part is known, so it is taken as the other's."""
    return first.record.job_id == second.record.job_id or first.is_script or second.is_script


def read_pair(first: Path, second: Path) -> tuple[LoadedRun, LoadedRun]:
    """Read two runs.

    Raises HarnessError for a path without one record, a run that did not finish, a backend that is not
    installed, a script beside a run of another model, different devices, and dropout in runs of one job.
    """
    pair = _read(first), _read(second)
    for run in pair:
        if run.record.status not in ("ok", "diverged") or not run.record.steps:
            why = reason(run.record) or "no step was finished"
            raise HarnessError(
                f"{run.record.run_id} is {run.record.status} ({why}): only finished runs can be diagnosed"
            )
        if not run.is_script:
            canonical_label(run.record.backend.label)
        if has_dropout(run.record) and one_job(*pair):
            raise HarnessError(
                f"{run.record.run_id} trained with dropout, so two runs differ by chance; repeat both with "
                "--set model.dropout=0"
            )
    left, right = (run.record for run in pair)
    if any(run.is_script for run in pair):
        _require_one_model(left, right)
    begin, end = max(first_step(left), first_step(right)), min(r.steps[-1].step for r in (left, right))
    if begin > end:
        raise HarnessError(
            f"these runs have no step in common: {left.run_id} took steps {_span(left)}, {right.run_id} "
            f"{_span(right)}"
        )
    devices = [run.record.world.device for run in pair]
    if devices[0] != devices[1]:
        raise HarnessError(
            f"these runs were on {' and '.join(devices)}: kernels differ, not only backends; give two runs "
            "on one kind of device"
        )
    if pair[0].name == pair[1].name:
        pair = replace(pair[0], place="first"), replace(pair[1], place="second")
    return pair


def _span(record: Record) -> str:
    return f"{record.steps[0].step} to {record.steps[-1].step}"


def _require_one_model(left: Record, right: Record) -> None:
    """Of a script only a part of the job is known: what it trains must have the tensors of the other's."""
    shapes = [sorted(p.shape for p in r.layout.parameters) for r in (left, right) if r.layout is not None]
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        raise HarnessError(
            f"these are runs of different models: {len(shapes[0])} parameters in {left.run_id} and "
            f"{len(shapes[1])} in {right.run_id} have other shapes; give two runs that train one model"
        )


def _read(path: Path) -> LoadedRun:
    if not path.exists() and archive_of(path) is None:
        siblings = [sibling.name for sibling in path.parent.glob("*") if sibling.is_dir()]
        hint = suggestion(path.name, siblings) or "Give the folder of a run or its record.json"
        raise HarnessError(f"there is no '{path}'. {hint}")
    found, unreadable = read_runs([path])
    if len(found) == 1 and not unreadable:
        return LoadedRun(path=found[0][0], record=found[0][1])
    runs = place_of_runs(path)
    one = runs / found[0][0].parent.relative_to(runs.resolve())
    raise HarnessError(
        f"'{path}' holds {len(found) + len(unreadable)} records; give the folder of one run, such as {one}"
    )
