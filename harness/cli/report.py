"""`harness report`: writes a report of records, or of those before and after a change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click

from harness.cli.options import (
    EXIT_STRICT,
    OUTPUT_FILE,
    PATH,
    common,
    given_price,
    json_option,
    price_option,
    runs_option,
    warn_skipped,
)
from harness.cli.output import begin, echo
from harness.diagnose import diagnosis as diagnosing
from harness.diagnose.diagnosis import Diagnosis
from harness.diagnose.jobs import JobsDiagnosis, diagnose_jobs
from harness.diagnose.rerun import one_job, read_pair
from harness.errors import HarnessError
from harness.files import stream_number
from harness.job.experiment import ReportFocus
from harness.judge.changes import parse_conditions
from harness.judge.wording import counted
from harness.launch.owner import lines_about
from harness.nested import finite
from harness.record.store import (
    ARCHIVE_NAME,
    archive_runs,
    is_folder_of_runs,
    place_of_runs,
    read_runs,
    without_collection,
)
from harness.tell.before_after import failures, verdict
from harness.tell.document import Document
from harness.tell.manifest import Asked, Format
from harness.tell.report import (
    Run,
    format_of,
    prepare_report,
    require_writable,
    without_odd_runs,
    write_document,
)
from harness.tell.verify import verify as verify_report


@click.command()
@common
@click.argument("some", nargs=-1, type=PATH, metavar="[RUNS]...")
@runs_option
@click.option("-o", "--output", required=True, type=OUTPUT_FILE)
@click.option("--format", "form", type=click.Choice(["md", "html", "csv", "json"]))
@click.option("--question", type=click.Choice(get_args(ReportFocus)))
@click.option("--subject", default="")
@price_option
@click.option("--baseline", is_flag=True)
@click.option("--over", metavar="FACT", default="")
@click.option("--fail-on", metavar="CONDITIONS")
@click.option("--archive", is_flag=True)
def report(
    some: tuple[Path, ...],
    runs: Path,
    output: Path,
    form: Any,
    question: Any,
    subject: str,
    price_per_gpu_hour: str | None,
    baseline: bool,
    over: str,
    fail_on: str | None,
    archive: bool,
) -> int:
    """Write a report of records: files, run folders, folders of runs, or archives (runs.tar.xz).

    RUNS: which records; default: those of --runs.
    """
    given = some or (runs,)
    begin("reading the records")
    if baseline and archive:
        raise HarnessError("--archive packs one set of runs; with --baseline give two archives")
    if (baseline or over) and (question or subject or price_per_gpu_hour or (baseline and over)):
        raise HarnessError(
            "--question, --subject and --price-per-gpu-hour exclude --baseline and --over, which show what "
            "changed, one at a time"
        )
    if fail_on is not None and not baseline:
        raise HarnessError("--fail-on compares with a baseline; give --baseline and two sets of runs")
    if baseline and len(given) != 2:
        raise HarnessError(
            f"--baseline compares two sets of runs, {len(given)} given: first the baseline, then the other"
        )
    conditions = parse_conditions(fail_on) if fail_on is not None else []
    form = form or format_of(output)
    asked: Asked = {
        "question": question, "subject": subject, "price": given_price(price_per_gpu_hour), "over": over
    }  # fmt: skip
    with without_collection():
        *before, after = [_read([path]) for path in given] if baseline else [_read(given, strict=archive)]
        require_writable(output, form)
        folders = list(filter(is_folder_of_runs, map(place_of_runs, given)))
        if archive:
            folders = [output.parent / ARCHIVE_NAME]
            after = archive_runs(after, folders[0])
        sides, document = _written([*before, after], output, form, asked, folders)
    left_out = ""
    if stream_number(output) is not None and form not in ("html", "json"):
        left_out = "; pictures and tables next to it are left out: give a file, or --format html"
    counts = counted(len(sides[0]), "record") + (f" before, {len(sides[1])} after" if baseline else "")
    echo(f"{output}: {counts}{left_out}", err=True)
    if not baseline:
        return 0
    failed = failures(conditions, document)
    for line in (*verdict(document), *(f"fail-on: {one}" for one in failed)):
        echo(line, err=True)
    return EXIT_STRICT if failed else 0


def _written(
    sides: Sequence[Sequence[Run]], output: Path, form: Format, asked: Asked, folders: Sequence[Path]
) -> tuple[Sequence[Sequence[Run]], Document]:
    """Write the report, of two sides the first as baseline; the runs in it, odd ones left out by name."""

    def write(sides: Sequence[Sequence[Run]], folders: Sequence[Path] = ()) -> Document:
        whole: Asked = {**asked, "folders": folders, "baseline": sides[0] if len(sides) > 1 else ()}
        prepared = prepare_report(sides[-1], output, form=form, **whole)
        prepared.write(output)
        return prepared.document

    try:
        return sides, write(sides, folders)
    except (HarnessError, OSError):
        raise
    except Exception:
        found = [without_odd_runs(s, lambda some: prepare_report(some, output, form=form)) for s in sides]
        warn_skipped(why for _, odd in found for why in odd)
        sides = [sound for sound, _ in found]
        return sides, write(sides)


def _read(paths: Sequence[Path], *, strict: bool = False) -> Sequence[Run]:
    for folder in filter(Path.is_dir, paths):
        for line in lines_about(folder):
            echo(line, err=True)
    found, unreadable = read_runs(paths)
    if strict and unreadable:
        raise HarnessError(f"--archive needs readable records; fix or remove: {unreadable[0]}")
    warn_skipped(unreadable)
    return found


@click.command()
@click.argument("report", type=PATH)
@json_option
@common
def verify(report: Path, as_json: bool) -> int:
    """Recompute a report from its records and list every line that differs.

    Exits with 0 only if every table, sentence and picture follows from unchanged records.
    """
    begin(f"recomputing {report}")
    with without_collection():
        result = verify_report(report)
    if as_json:
        echo(json.dumps(result.as_json(), indent=1, ensure_ascii=False))
    for note in result.notes:
        echo(f"note: {note}", err=True)
    for problem in result.problems:
        echo(str(problem), err=as_json)
    if result.problems:
        count = len(result.problems)
        echo(f"{report}: {counted(count, 'problem')}", err=True)
        return 1
    echo(f"{report}: holds; {result.summary}", err=as_json)
    return 0


@click.command()
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@click.option("--strict", is_flag=True)
@click.option("--rerun", "reruns", is_flag=True)
@json_option
@common
def diagnose(first: Path, second: Path, strict: bool, reruns: bool, as_json: bool) -> int:
    """Explain why two runs differ, given their folders.

    Of one job: the settings in force that differ, the first step, the tensors and the ratio of the
    difference, or that there is none beyond noise. Reruns both on this machine, and the reference if noise
    was not measured. Of different jobs: the settings that differ and each figure that does, the first one
    first; --rerun finds the setting that makes the difference. Of an observed script only the records are
    compared.
    """
    pair = read_pair(first, second)

    def say(text: str) -> None:
        echo(text, err=True)

    diagnosis: Diagnosis | JobsDiagnosis = (
        diagnosing.diagnose(pair, say) if one_job(*pair) else diagnose_jobs(pair, say, reruns=reruns)
    )
    if as_json:
        runs = {"runs": [run.record.run_id for run in pair]}
        echo(json.dumps(finite(runs | diagnosis.as_json()), indent=1))
    elif isinstance(diagnosis, JobsDiagnosis):
        echo(diagnosis.verdict())
        for sentence in diagnosis.sentences():
            echo(f"- {sentence}")
    else:
        names = f"{diagnosis.other.name} and {diagnosis.baseline.name}"
        if diagnosis.verdict is None:
            echo(f"{names}: {diagnosis.outcome}")
        elif diagnosis.verdict.parts:
            echo(f"{names} diverge in step {diagnosis.verdict.step}")
        else:
            where = "in no examined step" if diagnosis.is_reproduced else "not when run again here"
            echo(f"{names} differ, but {where}")
        lines = [*(f"- {sentence}" for sentence in diagnosis.explanation), *diagnosis.table()]
        for line in [*lines, "noise:", *(f"- {sentence}" for sentence in diagnosis.derivation)]:
            echo(line)
    return EXIT_STRICT if strict and not diagnosis.clean else 0


FORMATS = (".md", ".html")


def require_format(output: Path | None) -> None:
    """Raise HarnessError for a file whose name tells no format."""
    if output is not None and output.suffix not in FORMATS:
        raise HarnessError(f"--output was given '{output}'; end its name in {' or '.join(FORMATS)}")


def show(document: Document, output: Path | None, data: dict[str, Any] | None, made_by: str) -> int:
    """Print a document of files, on standard error beside its data, and write it with its pictures."""
    from harness.tell.traces import terminal_lines

    for line in terminal_lines(document):
        echo(line, err=data is not None)
    if output is not None:
        write_document(document, output, made_by)
        echo(f"report: {output}", err=True)
    if data is not None:
        echo(json.dumps(finite(data), indent=1))
    return 0


@click.command()
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@click.option("--baseline", type=PATH, multiple=True, metavar="FILE")
@click.option("--parameters", type=click.IntRange(1))
@click.option("-o", "--output", type=PATH, metavar="FILE")
@json_option
@common
def trace(
    files: tuple[Path, ...],
    baseline: tuple[Path, ...],
    parameters: int | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Show where the time of traces went: computing, communicating, copying, idling.

    FILE is a trace of torch.profiler (export_chrome_trace), plain or gzip, of any program: one rank or
    several. Lists collectives with bytes and bus bandwidth, who waits for whom, and which strategy they
    look like.
    """
    from harness.tell.traces import trace_document
    from harness.traces.analysis import read_traces, skew_of
    from harness.traces.document import changes_of, document
    from harness.traces.strategy import likeness_of

    require_format(output)
    begin("reading traces")
    ranks = read_traces(files)
    before = read_traces(baseline) if baseline else []
    skew = skew_of(ranks)
    likeness = [likeness_of(rank, parameters) for rank in ranks]
    changes = changes_of(ranks, before) if before else None
    data = document(ranks, skew, likeness, changes) if as_json else None
    return show(trace_document(ranks, skew, likeness, changes), output, data, "harness trace")


@click.command()
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", type=PATH, metavar="FILE")
@json_option
@common
def snapshot(files: tuple[Path, ...], output: Path | None, as_json: bool) -> int:
    """Show what was alive at the peak of a CUDA memory snapshot, and whose it was.

    FILE is what torch.cuda.memory._dump_snapshot wrote (a pickle, of which nothing is executed), or the
    same as JSON, plain or gzip. Shows fragmentation and blocks held for other streams too.
    """
    from harness.snapshots.account import accounts, read_snapshot
    from harness.tell.dumps import snapshot_document

    require_format(output)
    begin("reading snapshots")
    found = []
    for file in files:
        of_file = accounts(read_snapshot(file))
        if not of_file:
            raise HarnessError(
                f"snapshot '{file}' has no memory of any device and no history: nothing to show"
            )
        found.append((str(file), of_file))
    devices = [{"file": name, **account.as_json()} for name, of_file in found for account in of_file]
    return show(
        snapshot_document(found), output, {"devices": devices} if as_json else None, "harness snapshot"
    )


@click.command()
@click.argument("dumps", type=PATH, nargs=-1, required=True, metavar="DUMP...")
@json_option
@common
def hang(dumps: tuple[Path, ...], as_json: bool) -> int:
    """Show which collective each rank waits in, from dumps of torch's flight recorder.

    The first line names the rank that the others wait for. DUMP is what torch's flight recorder wrote of a
    rank (a pickle, of which nothing is executed, or JSON; its name ends in the rank: nccl_trace_rank_3), a
    folder of such files, or that of a run that was stuck.
    """
    from harness.snapshots.flight_recorder import explain, read_dumps
    from harness.tell.dumps import hang_document

    begin("reading dumps")
    found = explain(read_dumps(dumps))
    return show(hang_document(found), None, found.as_json() if as_json else None, "harness hang")
