"""`harness compare`: runs the missing cells of a matrix, then compares all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.dry_run import show_plan
from harness.cli.matrix import (
    MissingCells,
    Until,
    add_rounds,
    force_option,
    largest_batches,
    open_store,
    parse_until,
)
from harness.cli.options import (
    EXIT_INTERRUPTED,
    EXIT_STRICT,
    OUTPUT_FILE,
    GivenFiles,
    backends_option,
    given_options,
    job_options,
    json_option,
    measuring,
    numbers,
    priced,
    repeats_option,
    require_gpus,
    resolve_device,
    resume_options,
    runs_option,
    split_backends,
    view_options,
    warn_skipped,
)
from harness.cli.output import View, echo
from harness.errors import HarnessError
from harness.files import stream_number
from harness.job.experiment import CompareSection, Experiment
from harness.judge.wording import ranks
from harness.launch import started_as_rank
from harness.launch.cells import BOTH_KERNELS, have_both_kernels, plan, reusable
from harness.launch.owner import made_in_job, requeued_job
from harness.record import Record
from harness.record.store import Store, keep_runs
from harness.run_directory.checkpoint import Resume
from harness.run_directory.request import RunRequest

if TYPE_CHECKING:
    from harness.judge.comparison import Comparison
    from harness.judge.rows import JudgedRun
    from harness.plan.fit import LargestBatches

RECORDS_SUFFIX = ".runs"
"""Of the folder with the records of a report."""

# What makes tables is imported where it is used: the ranks' imports, which take longer, start before.


@click.command()
@measuring
@priced
@job_options
@backends_option
@click.option("--nproc", help="Ranks on this machine, comma-separated: 2,4.")
@repeats_option
@click.option("--within", help="Add rounds until speeds are in order and known within so much: 3%.")
@click.option(
    "--max-minutes", type=click.FloatRange(0, min_open=True),
    help="Add rounds until each speed is in order; start none after so long.",
)  # fmt: skip
@runs_option
@click.option(
    "--report",
    type=OUTPUT_FILE,
    help="Write a report here; the format follows from the extension.",
)
@click.option(
    "--batch", type=click.Choice(["equal", "largest"]), default="equal", show_default=True,
    help="largest: each backend with the largest micro-batch that fits, at the same global batch.",
)  # fmt: skip
@click.option("--fresh", is_flag=True, help="Run every cell, even if it has a record.")
@click.option("--strict", is_flag=True, help="Exit with 3 if a cell failed or parity failed.")
@force_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="List the cells, which have a record, how long the others take and whether they fit.",
)
@resume_options
@json_option
@view_options
@given_options
def compare(
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
    given: GivenFiles,
) -> int:
    """Run the missing cells of backends x world sizes x repeats and compare them all."""
    if started_as_rank():
        raise HarnessError(
            "compare starts its own ranks: run it without torchrun, or "
            "start `harness run` under torchrun for each backend"
        )
    until = parse_until(within, max_minutes)
    view.begin("checking the job, its data and this machine")
    device = resolve_device(experiment.runtime.device)
    asked = split_backends(backends) if backends is not None else experiment.compare.backends
    sizes = numbers(nproc, "--nproc", "ranks") if nproc is not None else experiment.compare.world_sizes
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

        def planned(rounds: int) -> list[RunRequest]:
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
    other = "--within or --max-minutes" if adds_rounds else other
    if batch == "largest" and other is not None:
        raise HarnessError(f"--batch largest and {other} exclude each other; leave one out")


def _enlarged(cells: Sequence[RunRequest], batches: LargestBatches) -> list[RunRequest]:
    from harness.plan.fit import cut_lines

    enlarged = batches.enlarged(cells)
    for line in cut_lines(enlarged):
        echo(line, err=True)
    return enlarged


def _tell_known(
    cells: Sequence[RunRequest], known: Mapping[str, Record], job: str | None, view: View
) -> None:
    count = sum(cell.key in known for cell in cells)
    if have_both_kernels(cells):
        view.say(BOTH_KERNELS)
    if count:
        again = f"job {job} was started again: " if job is not None else ""
        view.say(f"{again}{count} of {len(cells)} cells have a record")
    for cell in cells:
        if view.verbose and cell.key in known:
            view.say(f"{cell.backend} on {ranks(cell.world_size)}: record {known[cell.key].run_id}")


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


def _any_bad(rows: Sequence[JudgedRun]) -> bool:
    """Whether a cell failed, left its reference, or was no run of the same job."""
    return any(
        row.record.status not in ("ok", "unsupported")
        or row.judgement.parity == "diverged"
        or row.judgement.not_same_job
        for row in rows
    )
