"""`harness compare`: runs the missing cells of a matrix, then compares all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import click

from harness.backends import registry
from harness.backends.base import World
from harness.cli.cells.cell_runs import MissingCells, largest_batches, open_store
from harness.cli.cells.preflight import force_option, foresee_planned, show
from harness.cli.cells.rounds import Until, add_rounds, parse_until
from harness.cli.options.arguments import numbers, require_gpus, split_backends
from harness.cli.options.device import resolve_device
from harness.cli.options.given import GivenFiles, given_options
from harness.cli.options.price import priced
from harness.cli.options.shared import (
    EXIT_INTERRUPTED,
    EXIT_STRICT,
    PATH,
    backends_option,
    config_option,
    found_checkpoint,
    json_option,
    load_job,
    measuring,
    model_option,
    repeats_option,
    resume_option,
    runs_option,
    set_option,
    trace_option,
    trust_option,
    view_options,
    warn_skipped,
    with_trace,
)
from harness.cli.terminal.output import View, echo
from harness.cli.terminal.progress import duration
from harness.errors import HarnessError
from harness.files import stream_number
from harness.job.experiment import CompareSection, Experiment
from harness.judge.wording import ranks
from harness.launch.cells import BOTH_KERNELS, Cell, have_both_kernels, is_refused, plan, reusable
from harness.launch.external import started_as_rank
from harness.launch.owner import made_in_job, requeued_job
from harness.nested import differences
from harness.plan.preflight import ASSUMED, assumed_time
from harness.plan.scenario import why_not_planned
from harness.record import Record
from harness.record.provenance import package_versions
from harness.record.store import Store, keep_runs
from harness.tell.narrow import fitted

if TYPE_CHECKING:
    from harness.judge.comparison import Comparison
    from harness.judge.rows import Row
    from harness.plan.fit.comparison import LargestBatches
    from harness.plan.preflight import Forecast

MOST_NAMED = 3
"""Settings that one line names."""
Runs = Sequence[tuple[Path, Record]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cell before it runs."""

    cell: Cell
    record: Record | None
    """The record that would be used."""
    why: str
    """Why there is none, or which one."""
    seconds: float | None
    """How long it would run; None: not known."""
    seconds_from: Literal["runs", "flops"] | None
    """Like runs of this folder, or the model's FLOPs over an assumed rate."""
    runs: bool = True
    """Whether ranks would start if there is no record: not where the strategy cannot run this job."""


def show_plan(
    cells: Sequence[Cell],
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
    foreseen = foresee_planned([plan.cell for plan in missing], device, limit, force=force)
    missing = [plan for plan in missing if foreseen.refusal(plan.cell.key) is None]
    if as_json:
        echo(json.dumps({"cells": [_document(plan, foreseen) for plan in plans]}, indent=1))
        return 0
    headers = ("backend", "ranks", "repeat", "time", "record")
    both = have_both_kernels(cells)
    rows = [
        [
            _labelled(plan.cell) if both else plan.cell.backend,
            str(plan.cell.world_size), str(plan.cell.repeat),
            _time(plan), plan.why,
        ]
        for plan in plans
    ]  # fmt: skip
    echo(fitted(rows, headers, wide=view.wide))
    echo(_summary(missing, len(plans)), err=True)
    if both:
        echo(BOTH_KERNELS, err=True)
    show(foreseen)
    if any(plan.seconds_from == "flops" for plan in missing):
        echo(ASSUMED, err=True)
    return 0


def _labelled(cell: Cell) -> str:
    """The backend of one of two cells that are alike but for their kernels."""
    return f"{cell.backend} (deterministic)" if cell.job.training.deterministic else cell.backend


def _time(plan: Plan) -> str:
    if plan.seconds is None or plan.record:
        return "-"
    return ("~" if plan.seconds_from == "flops" else "") + duration(plan.seconds)


def _summary(missing: Sequence[Plan], cells: int) -> str:
    guessed = [plan.seconds for plan in missing if plan.seconds is not None]
    text = f"{len(missing)} of {cells} cells would run"
    if not missing:
        return text
    if not guessed:
        return f"{text}; no time estimate: nothing similar ran, and their FLOPs are unknown"
    unknown = len(missing) - len(guessed)
    text += f", about {duration(sum(guessed))}"
    return f"{text}, and {unknown} of unknown length" if unknown else text


def _planned(cell: Cell, record: Record | None, found: Runs, device: str) -> Plan:
    if record is not None:
        return Plan(cell=cell, record=record, why=record.run_id, seconds=None, seconds_from=None)
    if (reason := _unsupported(cell, device)) is not None:
        why = f"none: unsupported: {reason}"
        return Plan(cell=cell, record=None, why=why, seconds=None, seconds_from=None, runs=False)
    why = _why_not(cell, [r for _, r in found])
    if (seconds := _seconds(cell, found)) is not None:
        return Plan(cell=cell, record=None, why=why, seconds=seconds, seconds_from="runs")
    assumed = assumed_time(cell, device)
    if assumed is None:
        return Plan(cell=cell, record=None, why=why, seconds=None, seconds_from=None)
    return Plan(cell=cell, record=None, why=why, seconds=assumed.total, seconds_from="flops")


def _unsupported(cell: Cell, device: str) -> str | None:
    """Why a strategy cannot run a cell; None: it can, or it is a third party's, which only ranks know."""
    if registry.strategy_of(cell.backend) is None:
        return None
    world = World.planned(
        cell.world_size, cell.world_size // cell.nodes, "cuda" if device == "cuda" else "cpu"
    )
    return why_not_planned(cell.backend, cell.job, world, cell.layout.micro_batch_size)


def _why_not(cell: Cell, records: Sequence[Record]) -> str:
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


def _difference(cell: Cell, record: Record) -> str:
    if cell.job_id != record.job_id:
        given, other = cell.job.model_dump(mode="json"), record.job.model_dump(mode="json")
        named = [".".join(keys) for keys, _, _ in differences(given, other)]
        return f"another job: {_listed(named)}" if named else "another job: its data or model changed"
    measure = record.measure.model_dump() if record.measure is not None else {}
    if named := [".".join(keys) for keys, _, _ in differences(cell.measure.model_dump(), measure)]:
        return f"measured with other settings: {_listed([f'measure.{name}' for name in named])}"
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
        return f"other versions: {_listed(changed)}"
    return "code, machine, device or threads changed"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _seconds(cell: Cell, found: Runs) -> float | None:
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


def _document(plan: Plan, foreseen: Forecast) -> dict[str, Any]:
    cell = plan.cell
    part = foreseen.parts.get(cell.key)
    return {
        "backend": cell.backend,
        "world_size": cell.world_size,
        "repeat": cell.repeat,
        "deterministic": cell.job.training.deterministic,
        "run_id": plan.record.run_id if plan.record else None,
        "why": None if plan.record else plan.why.removeprefix("none: "),
        "seconds": plan.seconds,
        "seconds_from": plan.seconds_from,
        "prediction": part.model_dump(mode="json") if part else None,
        "no_prediction": foreseen.reason(cell.key),
    }


RECORDS_SUFFIX = ".runs"
"""Of the folder with the records of a report."""

# What makes tables is imported where it is used: the ranks' imports, which take longer, start before.


@click.command()
@config_option
@model_option
@backends_option
@click.option("--nproc", help="Ranks on this machine, comma-separated: 2,4.")
@repeats_option
@click.option("--precision", help="Add rounds until speeds are in order and known to this precision: 3%.")
@click.option(
    "--max-minutes", type=click.FloatRange(0, min_open=True),
    help="Add rounds until each speed is in order; start none after so long.",
)  # fmt: skip
@set_option
@runs_option
@click.option(
    "--report",
    type=PATH,
    help="Write a report here; the format follows from the extension.",
)
@click.option(
    "--batch", type=click.Choice(["equal", "largest"]), default="equal", show_default=True,
    help="largest: each backend with the largest micro-batch that fits, at the same global batch.",
)  # fmt: skip
@click.option("--fresh", is_flag=True, help="Run every cell, even if it has a record.")
@click.option("--strict", is_flag=True, help="Exit with 3 if a cell failed or parity failed.")
@force_option
@trace_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="List the cells, which have a record, how long the others take and whether they fit.",
)
@resume_option
@trust_option
@json_option
@measuring
@view_options
@given_options
@priced
def compare(
    config: Path | None,
    model: str | None,
    backends: str | None,
    nproc: str | None,
    repeats: int | None,
    precision: str | None,
    max_minutes: float | None,
    assignments: tuple[str, ...],
    runs: Path,
    report: Path | None,
    batch: str,
    fresh: bool,
    strict: bool,
    force: bool,
    trace: bool,
    dry_run: bool,
    resume_from: str | None,
    trust_checkpoint: bool,
    as_json: bool,
    view: View,
    given: GivenFiles,
) -> int:
    """Run the missing cells of backends x world sizes x repeats and compare them all."""
    _require_no_launcher()
    until = parse_until(precision, max_minutes)
    experiment = load_job(config, with_trace(assignments, trace), model)
    view.begin("checking the job, its data and this machine")
    device = resolve_device(experiment.runtime.device)
    asked = split_backends(backends) if backends is not None else experiment.compare.backends
    sizes = numbers(nproc, "--nproc", "ranks") if nproc is not None else experiment.compare.world_sizes
    resume = found_checkpoint(resume_from, runs, trusted=trust_checkpoint)
    _require_equal_batches(batch, resume is not None, given, adds_rounds=until != Until())
    experiment, rows = given.rows(experiment, view)
    count = repeats or experiment.compare.repeats
    cells = plan(experiment, asked, sizes, count, device, resume=resume, rows=rows)
    require_gpus(device, max(sizes))
    store = Store(runs) if dry_run else open_store(runs)
    _require_writable(None if dry_run else report)
    found = _takeable_runs(store, fresh, job := requeued_job())
    known = reusable([record for _, record in found], lambda _: True)
    batches = largest_batches(cells, experiment, device) if batch == "largest" else None
    cells = _enlarged(cells, batches) if batches is not None else cells
    if dry_run:
        return show_plan(cells, known, found, device, experiment, force=force, as_json=as_json, view=view)
    _tell_known(cells, known, job, view)
    rounds, fresh = until.rounds(count), fresh and job is None
    made = MissingCells(store, experiment, device, found, rounds, fresh=fresh, force=force, view=view)
    records = made.records(cells, known, batches)
    if until != Until():

        def planned(rounds: int) -> list[Cell]:
            return plan(experiment, asked, sizes, rounds, device, resume=resume, rows=rows)

        records = add_rounds(planned, made, known, records, until, view)
    shown = [(made.files[id(r)], r) for r in records]
    comparison = _show(shown, report, experiment.compare, as_json, view)
    if made.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_STRICT if strict and _any_bad(comparison.rows) else 0


def _require_equal_batches(batch: str, resumes: bool, given: GivenFiles, *, adds_rounds: bool) -> None:
    """Raise HarnessError for what decides batches by itself next to --batch largest."""
    other = "--resume-from" if resumes else "a file of settings" if given.count else None
    other = "--precision or --max-minutes" if adds_rounds else other
    if batch == "largest" and other is not None:
        raise HarnessError(f"--batch largest and {other} exclude each other; leave one out")


def _enlarged(cells: Sequence[Cell], batches: LargestBatches) -> list[Cell]:
    from harness.plan.fit.comparison import cut_lines

    enlarged = batches.enlarged(cells)
    for line in cut_lines(enlarged):
        echo(line, err=True)
    return enlarged


def _tell_known(cells: Sequence[Cell], known: Mapping[str, Record], job: str | None, view: View) -> None:
    count = sum(cell.key in known for cell in cells)
    if have_both_kernels(cells):
        view.say(BOTH_KERNELS)
    if count:
        again = f"job {job} was started again: " if job is not None else ""
        view.say(f"{again}{count} of {len(cells)} cells have a record")
    for cell in cells:
        if view.verbose and cell.key in known:
            view.say(f"{cell.backend} on {ranks(cell.world_size)}: record {known[cell.key].run_id}")


def _require_no_launcher() -> None:
    if started_as_rank():
        raise HarnessError(
            "compare starts its own ranks: run it without torchrun, or "
            "start `harness run` under torchrun for each backend"
        )


def _require_writable(report: Path | None) -> None:
    if report is not None:
        from harness.tell.report import require_writable

        require_writable(report)


def _write_report(runs: Sequence[tuple[Path, Record]], report: Path | None, asked: CompareSection) -> None:
    """Write the report with a folder of its own records next to it: later runs do not concern it."""
    if report is None:
        return
    from harness.tell.report import write_report

    if stream_number(report) is not None:
        write_report(runs, report, question=asked.question, price=asked.price_per_gpu_hour)
        return
    folder = report.with_name(report.name + RECORDS_SUFFIX)
    write_report(
        keep_runs(runs, folder),
        report,
        question=asked.question,
        price=asked.price_per_gpu_hour,
        folders=[folder],
    )


def _takeable_runs(store: Store, fresh: bool, requeued: str | None) -> list[tuple[Path, Record]]:
    """Records to take over with their files; one that cannot be read is named and skipped.

    Fresh means none, but for those that earlier attempts of the same requeued job made.
    """
    if fresh and requeued is None:
        return []
    found, unreadable = store.runs()
    warn_skipped(unreadable)
    if not fresh or requeued is None:
        return found
    of_job = set(map(id, made_in_job([record for _, record in found], requeued)))
    return [run for run in found if id(run[1]) in of_job]


def _show(
    runs: Sequence[tuple[Path, Record]], report: Path | None, asked: CompareSection, as_json: bool, view: View
) -> Comparison:
    """Write the report and print the table; a record of which nothing can be shown is passed over by name."""
    try:
        return _present(runs, report, asked, as_json, view)
    except (HarnessError, OSError):
        raise
    except Exception:
        from harness.tell.report import prepare_report, without_odd_runs

        def trial(some: Sequence[tuple[Path, Record]]) -> object:
            return _texts(some, view), prepare_report(some, report) if report is not None else None

        sound, odd = without_odd_runs(runs, trial)
        warn_skipped(odd)
        return _present(sound, report, asked, as_json, view)


def _present(
    runs: Sequence[tuple[Path, Record]], report: Path | None, asked: CompareSection, as_json: bool, view: View
) -> Comparison:
    from harness.tell.terminal import where_to_read

    comparison, table, document = _texts(runs, view)
    _write_report(runs, report, asked)
    # With --json a person reads the table, a program the document.
    echo(table, err=as_json)
    if as_json:
        echo(document)
    for line in where_to_read(comparison):
        view.say(line)
    if report is not None:
        view.say(f"report: {report}")
    return comparison


def _texts(runs: Sequence[tuple[Path, Record]], view: View) -> tuple[Comparison, str, str]:
    """The comparison, its table and its document."""
    from harness.judge.comparison import Comparison
    from harness.tell.terminal import finding_lines, terminal_table

    comparison = Comparison(record for _, record in runs)
    table = "\n".join(
        [terminal_table(comparison, wide=view.wide), *finding_lines(comparison, wide=view.wide)]
    )
    document = comparison.as_json() | {"records": [str(path) for path, _ in runs]}
    return comparison, table, json.dumps(document, indent=1)


def _any_bad(rows: Sequence[Row]) -> bool:
    """Whether a cell failed, left its reference, or was no run of the same job."""
    return any(
        row.record.status not in ("ok", "unsupported")
        or row.judgement.parity == "diverged"
        or row.judgement.not_same_job
        for row in rows
    )
