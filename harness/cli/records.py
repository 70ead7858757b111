"""Finds the runs that a person names: by id, by a part of it, by a file or folder, or as the latest."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args

import click

from harness.backends.refusals import suggestion
from harness.bounds import MOST_DOCUMENT_BYTES
from harness.cli.options import common, json_option, runs_option, warn_skipped, wide_option
from harness.cli.output import echo
from harness.errors import HarnessError
from harness.files import read_plain, write_atomically
from harness.job.experiment import Experiment
from harness.judge.comparison import Comparison
from harness.judge.facts import METRICS, SPEED
from harness.judge.quantities import Run, between_steps, counts_samples, kinds_at, loss_unit
from harness.judge.rows import reason
from harness.judge.run_conditions import labelled, script_names
from harness.judge.wording import counted
from harness.launch.owner import lines_about, without_record
from harness.nested import leaves, value_at
from harness.record import ObservationPart, Record
from harness.record.run import Status
from harness.record.store import Read, RecordFiles, Store, read_each, read_record, read_runs, record_text
from harness.run_directory.request import launcher_log
from harness.tell.formats import fitted, line_width, megabytes, milliseconds, number, one_line
from harness.tell.tables import figure_text
from harness.tell.terminal import finding_lines
from harness.version import __version__

LATEST = "latest"


@dataclass(frozen=True)
class Listed:
    """What a list says of a run."""

    backend: str
    """Without options."""
    document: dict[str, Any]
    record: Record | None = None
    """Of a script, whose row's name follows from the other scripts too."""

    @property
    def run_id(self) -> str:
        return str(self.document["run_id"])


INDEX_NAME = ".index.json"
FEWEST_INDEXED = 100
"""Runs; fewer are read at once."""


class _Index:
    """What was listed of the runs of a folder, by the state of their files.

    Of a file that changed, and after a change of the harness, it is made again; where it cannot be written
    there is none.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / INDEX_NAME
        self._found: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        with suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
            content = json.loads(read_plain(self._path, MOST_DOCUMENT_BYTES))
            if content["made_by"] == self._made_by:
                self._found = dict(content["runs"])

    @cached_property
    def _made_by(self) -> str:
        """Version and time of the newest source: what judges decides what a list says, not ranks alone."""
        newest = max(file.stat().st_mtime_ns for file in Path(__file__).parents[1].rglob("*.py"))
        return f"{__version__} {newest}"

    def read(self, path: Path, files: RecordFiles) -> Listed:
        run, state = path.parent.name, None
        with suppress(OSError):
            status = path.stat()
            # No other file has them: neither a copy that keeps times nor one that came along with an index.
            state = [status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size]
        match self._found.get(run):
            case [known, str(backend), dict(document)] if known == state is not None:
                found = Listed(backend, document)
            case _:
                record = read_record(path, files)
                kept = None if record.observation is None else record
                found = Listed(record.backend.name, _document(record), kept)
        if state is not None and found.record is None:
            self._kept[run] = [state, found.backend, found.document]
        return found

    def keep(self) -> None:
        if self._kept != self._found and len(self._kept) >= FEWEST_INDEXED:
            content = {"made_by": self._made_by, "runs": self._kept}
            with suppress(OSError):
                write_atomically(self._path, json.dumps(content))


def all_runs(folder: Path) -> list[tuple[Path, Listed]]:
    """The readable runs of a folder or archive, oldest first; the others are named.

    Raises HarnessError where there is none.
    """
    if folder.is_dir():
        for line in lines_about(folder):
            echo(line, err=True)
    index = _Index(folder)
    found, unreadable = read_each([folder], index.read)
    index.keep()
    warn_skipped(unreadable)
    return sorted(found, key=lambda run: (run[1].document["created_at"], run[1].run_id))


def one_run(given: str, folder: Path) -> tuple[Path, Record]:
    """The run that `given` names. Raises HarnessError if there is none, or several."""
    if os.path.exists(given) or os.sep in given:  # a text that is too long for a path is none
        return _only(given, read_runs([Path(given)])[0])
    runs = all_runs(folder)
    found = runs[-1:] if given == LATEST else [run for run in runs if run[1].run_id == given]
    found = found or [run for run in runs if given in run[1].run_id]
    if not found:
        ids = [run.run_id for _, run in runs]
        hint = suggestion(given, ids) or "`harness list` shows them"
        raise HarnessError(f"no run in '{folder}' has '{given}' in its name. {hint}")
    path, _ = _only(given, found)
    return path, read_record(path)


def _only(given: str, found: list[tuple[Path, Read]]) -> tuple[Path, Read]:
    if len(found) > 1:
        first = ", ".join(run.run_id for _, run in found[:3]) + ", ..." * (len(found) > 3)
        raise HarnessError(f"'{given}' names {len(found)} runs ({first}); give more of the name")
    return found[0]


@click.command("list")
@runs_option
@click.option("--backend")
@click.option("--status", type=click.Choice(get_args(Status)))
@click.option("--job")
@wide_option
@json_option
@common
def list_runs(
    runs: Path, backend: str | None, status: str | None, job: str | None, wide: bool, as_json: bool
) -> int:
    """List the runs of a folder, oldest first, with status and figures."""
    listed = [
        run
        for _, run in all_runs(runs)
        if backend in (None, run.backend, run.document["backend"])
        and status in (None, run.document["status"])
        and (job is None or run.document["job_id"].startswith(job))
    ]
    scripts = script_names([run.record for run in listed if run.record is not None])
    documents = [
        {**run.document, "backend": labelled(run.document["backend"], scripts.get(id(run.record), ""))}
        for run in listed
    ]
    if as_json:
        echo(json.dumps({"runs": documents}, indent=1))
        return 0
    units = {document["rate_unit"] for document in documents if document["tokens_per_second"] is not None}
    rate = " or ".join(sorted(units)) or "tokens/s"
    headers = {
        "run_id": "run", "backend": "backend", "world_size": "ranks", "status": "status",
        "tokens_per_second": rate, "peak_bytes": "peak MB", "loss": "loss",
    }  # fmt: skip
    if wide:
        headers |= {
            "step_seconds": "step ms", "job_id": "job", "model": "model", "precision": "precision",
            "steps": "steps", "created_at": "started", "reason": "why",
        }  # fmt: skip
    texts = [[_text(key, document[key]) for key in headers] for document in documents]
    if len(units) > 1:
        for text, document in zip(texts, documents, strict=True):
            text[4] += f" {document['rate_unit']}" if document["tokens_per_second"] is not None else ""
    echo(fitted(texts, [*headers.values()], wide=wide))
    echo(f"{counted(len(listed), 'run')}; `harness show RUN` shows one in detail", err=True)
    return 0


def _document(record: Record) -> dict[str, Any]:
    run = Run.of(record)
    job, model = record.job, record.job.model.name
    if model is None and record.observation is None and job.model.factory is None:
        model = job.model.config_values().get("model_type")
    elif model is None and record.model is not None:
        model = record.model.architecture
    return {
        "run_id": record.run_id,
        "created_at": record.created_at,
        "backend": record.backend.label,
        "world_size": record.world.world_size,
        "nodes": record.world.nodes,
        "status": record.status,
        "reason": reason(record),
        "job_id": record.job_id,
        "model": model,
        "precision": job.training.precision,
        "steps": len(record.steps),
        "loss": record.last_loss,
        "tokens_per_second": run.tokens_per_second,
        "rate_unit": "samples/s" if counts_samples(record) else "tokens/s",
        "step_seconds": run.mean_step_seconds,
        "peak_bytes": max(run.rank_peaks, default=None),
    }


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "peak_bytes":
        return megabytes(value)
    if key == "step_seconds":
        return milliseconds(value)
    return number(value) if isinstance(value, float) else str(value)


@click.command()
@click.argument("run", default=LATEST)
@runs_option
@json_option
@common
def show(run: str, runs: Path, as_json: bool) -> int:
    """Show one run: how it ended, its figures, and the settings that differ from the defaults.

    RUN is a run id or a part of it that no other run has, a folder or file of one, or 'latest' (default).
    """
    path, record = one_run(run, runs)
    if as_json:
        echo(json.dumps(json.loads(record_text(record)), indent=1, ensure_ascii=False))
        return 0
    comparison = Comparison([record])
    for title, lines in _parts(path, record, comparison):
        echo(title)
        for line in _beside(lines):
            echo(line)
    for line in finding_lines(comparison):
        echo(line)
    return 0


def _beside(lines: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Names, and next to them values, whose words continue below their beginning."""
    width = max((len(name) for name, _ in lines), default=0)
    for name, value in lines:
        head = f"  {name:<{width}}  "
        pieces = wrap(value, line_width() - len(head), break_long_words=False, break_on_hyphens=False) or [""]
        yield head + pieces[0]
        yield from (" " * len(head) + piece for piece in pieces[1:])


def _parts(path: Path, record: Record, comparison: Comparison) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    world = record.world
    about = [
        ("status", record.status),
        ("started", record.created_at),
        ("backend", labelled(record.backend.label, script_names([record]).get(id(record), ""))),
        ("ranks", f"{world.world_size} on {world.nodes} node(s), {world.device}, {world.collectives}"),
        *([("dimensions", str(world.mesh))] if world.dimensions else []),
        ("batch", f"micro-batch {world.micro_batch_size}, accumulation {world.accumulation_steps}"),
        ("job", record.job_id),
        ("record", str(path)),
        *([("log", str(log))] if (log := launcher_log(path.parent)).is_file() else []),
    ]
    why = reason(record)
    yield record.run_id, [*about[:1], *([("why", why)] if why else []), *about[1:]]
    figures = list(_figures(record, comparison))
    if figures:
        yield "Figures", figures
    if record.prediction is not None:
        predicted = megabytes(record.prediction.peak_bytes)
        yield "Predicted", [("peak MB", f"{predicted} ({record.prediction.verdict or 'no limit known'})")]
    if record.observation is not None:
        yield "Observed", list(_observed(record, record.observation))
    yield "Non-default settings", list(_settings(record)) or [("-", "none")]
    versions = record.backend.versions
    yield "Versions", [(name, version) for name, version in versions.items()] or [("-", "not known")]
    yield "Command", [("$", " ".join(record.command))]
    if record.artifacts:
        yield "Files", [(part.kind, str(path.parent / part.path)) for part in record.artifacts]


def _figures(record: Record, comparison: Comparison) -> Iterator[tuple[str, str]]:
    if record.steps:
        yield "steps", str(len(record.steps))
        loss = record.steps[-1].loss
        yield "last loss", "n/a" if loss is None else f"{loss} {loss_unit(record)}".rstrip()
    for row in comparison.rows:
        for metric in METRICS:
            value = row.figures.get(metric.key)
            if value is not None and not (metric.key == SPEED and counts_samples(record)):
                yield metric.title, figure_text(metric, value)


def _observed(record: Record, observation: ObservationPart) -> Iterator[tuple[str, str]]:
    """What a script's figures are taken from, and what is n/a."""
    yield "command", " ".join(observation.command)
    yield "driven by", ", ".join(observation.frameworks) or "torch alone"
    yield "loss", observation.loss or "n/a"
    for (by, op), size in between_steps(record).items():
        yield "between steps", f"{op} of {size:,.0f} bytes a step by {by.replace('__main__', 'the script')}"
    if others := kinds_at(record, "after_backward").get("other_models"):
        yield "other models", f"{megabytes(others)} MB of weights on a rank"
    for note in observation.notes:
        yield "note", note
    for name, why in observation.unknown.items():
        yield f"n/a: {name}", why


def _settings(record: Record) -> Iterator[tuple[str, str]]:
    """Settings of the job and of measuring, with their values."""
    default = Experiment().model_dump(mode="json")
    given: dict[str, Any] = record.job.model_dump(mode="json")
    if record.measure is not None:
        given["measure"] = record.measure.model_dump(mode="json")
    for keys, value in leaves(given):
        if value != value_at(default, keys) and not (value is None and record.observation is not None):
            yield ".".join(keys), json.dumps(value)


UNFINISHED = ("failed", "timeout")
REPORTS = ("[!.]*.md", "[!.]*.html", "[!.]*.csv", "[!.]*.json")


@click.command()
@runs_option
@click.option("--yes", is_flag=True)
@common
def clean(runs: Path, yes: bool) -> int:
    """Remove runs that no comparison would reuse: failed, stopped or replaced by a later run.

    Without --yes nothing is removed; what a report in the folder lists is kept.
    """
    if not runs.is_dir():
        raise HarnessError(f"'{runs}' is not a folder of runs; give the one that --runs named")
    found, unreadable = Store(runs).runs()
    warn_skipped(unreadable)
    total = 0
    every = dict(_removable(runs, found))
    listed = _listed_in_reports(runs) if every else set()
    removed = {folder: why for folder, why in every.items() if folder.name not in listed}
    for folder, why in removed.items():
        size = sum(p.lstat().st_size for p in folder.rglob("*") if not p.is_dir())
        total += size
        if yes and folder.is_symlink():  # to a run that lies elsewhere, and stays
            folder.unlink()
        elif yes:
            shutil.rmtree(folder)
        echo(f"{one_line(folder.name)}: {why}, {megabytes(size)} MB")
    what = f"{counted(len(removed), 'run')}, {megabytes(total)} MB"
    echo(f"removed {what}" if yes else f"{what} to remove; --yes removes them", err=True)
    if kept := len(every) - len(removed):
        echo(f"{counted(kept, 'run')} kept: a report in {runs} lists them", err=True)
    return 0


def _listed_in_reports(root: Path) -> set[str]:
    """Every word of the reports in this folder, names of runs among them."""
    texts = (path.read_text("utf-8", "replace") for pattern in REPORTS for path in root.glob(pattern))
    return {word for text in texts for word in re.findall(r"[\w.-]+", text)}


def _removable(root: Path, found: Sequence[tuple[Path, Record]]) -> Iterator[tuple[Path, str]]:
    """Folders with the reason; `found`: oldest first."""
    last = {record.cell: path for path, record in found if record.status not in UNFINISHED}
    for path, record in found:
        if record.status in UNFINISHED:
            yield path.parent, record.status
        elif last[record.cell] != path:
            yield path.parent, "replaced by a later run"
    for folder, owner in without_record(root):
        if owner.is_gone:
            yield folder, "without a record: its launcher is gone"
