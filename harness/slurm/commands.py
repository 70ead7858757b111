"""What `harness slurm ...` does; printing through click, like the rest of the command line."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from harness.cells import canonical_label, reusable
from harness.cli.arguments import split_backends
from harness.compare.wording import counted
from harness.config import load_experiment
from harness.errors import HarnessError
from harness.slurm import client
from harness.slurm.attempt import begin, finish
from harness.slurm.collection import RunState, collect, look
from harness.slurm.exit_reason import Noticed, ScriptEnd
from harness.slurm.matrix import Matrix, plan_nodes, read_matrix, render_matrix, write_matrix
from harness.slurm.site import Site, load_site, with_time_limit
from harness.slurm.submission import AnotherSubmission, alone, read_jobs, submit_runs, unsubmitted
from harness.spec import Experiment
from harness.store import Store

DEFAULT_CPU_RANKS = 2


def render(
    *,
    site: Path,
    config: Path | None,
    backends: str | None,
    nodes: str,
    nproc: int | None,
    repeats: int | None,
    assignments: Sequence[str],
    runs: Path,
    output: Path,
    job_name: str,
    arrays: bool,
    time_limit: str | None,
    fresh: bool,
) -> int:
    """`harness slurm render`."""
    where = load_site(site)
    if time_limit is not None:
        where = with_time_limit(where, time_limit)
    experiment = _on_site(load_experiment(config, assignments), where)
    names = split_backends(backends) if backends is not None else experiment.compare.backends
    if names != ["all"]:
        names = [canonical_label(name) for name in names]
    per_node = nproc or where.gpus_per_node or DEFAULT_CPU_RANKS
    cells = plan_nodes(
        experiment, where, names, _numbers(nodes), per_node, repeats or experiment.compare.repeats
    )
    store = Store(runs)
    store.prepare()
    if not fresh:
        wanted = {cell.key for cell in cells}
        known = reusable(store.records()[0], wanted.__contains__)
        if known:
            click.echo(f"{len(known)} of {len(cells)} cells have a record", err=True)
        cells = [cell for cell in cells if cell.key not in known]
        if not cells:
            return 0
    matrix, scripts = render_matrix(
        cells, experiment, where, folder=output, runs_folder=runs, job_name=job_name, arrays=arrays,
        command=["harness", *sys.argv[1:]],
    )  # fmt: skip
    write_matrix(output, matrix, scripts)
    click.echo(f"{output}: {len(matrix.runs)} runs in {len(scripts)} scripts", err=True)
    return 0


def submit(folder: Path, *, wait: bool, poll_seconds: float, as_json: bool) -> int:
    """`harness slurm submit`."""
    matrix = read_matrix(folder)
    while True:
        try:
            left, states = _submit_some(folder, matrix, wait)
        except (client.SlurmUnavailable, AnotherSubmission) as error:
            if not wait:
                raise
            click.echo(f"{error}; asking again in {poll_seconds:g} s", err=True)
        else:
            if not wait or not (left or any(_pending(state) for state in states)):
                break
        time.sleep(poll_seconds)
    _present(folder, states, as_json)
    return 0


def status(folder: Path, *, as_json: bool) -> int:
    """`harness slurm status`."""
    _present(folder, look(folder, read_matrix(folder)), as_json)
    return 0


def collect_runs(folder: Path, *, report: Path | None, as_json: bool) -> int:
    """`harness slurm collect`."""
    matrix = read_matrix(folder)
    states = collect(folder, matrix)
    _present(folder, states, as_json)
    if report is not None:
        _report(matrix, states, report)
    return 0


def cancel(folder: Path, run_ids: Sequence[str]) -> int:
    """`harness slurm cancel`."""
    matrix = read_matrix(folder)
    states = look(folder, matrix)
    unknown = set(run_ids) - {state.run.request.run_id for state in states}
    if unknown:
        raise HarnessError(
            f"run '{min(unknown)}' is not of this matrix: `harness slurm status {folder}` lists its runs"
        )
    alive = [
        state.job
        for state in states
        if state.job is not None
        and state.facts is not None
        and state.facts.active
        and (not run_ids or state.run.request.run_id in run_ids)
    ]
    client.cancel(alive)
    _tell_unknown_jobs(folder)
    click.echo(f"cancelled {len(alive)} jobs; collect writes their records", err=True)
    return 0


def begin_run(run_directory: Path) -> int:
    """`harness slurm begin`, called by job scripts."""
    begin(run_directory)
    return 0


def finish_run(run_directory: Path, exit_code: int, ended: Noticed | None, require_busbw: str | None) -> int:
    """`harness slurm finish`, called by job scripts."""
    record = finish(run_directory, ScriptEnd(ended=ended, exit_code=exit_code, require_busbw=require_busbw))
    click.echo(f"{record.run_id}: {record.status}", err=True)
    return 0


def _on_site(experiment: Experiment, site: Site) -> Experiment:
    """The experiment with the site's device and threads, which this machine cannot know."""
    runtime = experiment.runtime
    if runtime.device not in ("auto", site.device):
        raise HarnessError(
            f"runtime.device is {runtime.device}, but site '{site.name}' has gpus_per_node "
            f"{site.gpus_per_node}; change one of them"
        )
    changes = {
        "device": site.device,
        "threads_per_rank": runtime.threads_per_rank or site.cpus_per_rank,
    }
    return experiment.model_copy(update={"runtime": runtime.model_copy(update=changes)})


def _numbers(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise HarnessError(f"--nodes was given '{text}'; give numbers of nodes such as 2 or 1,2,4")
    return list(dict.fromkeys(counts))


def _submit_some(folder: Path, matrix: Matrix, wait: bool) -> tuple[int, list[RunState]]:
    """Submit what the queue has room for; how many runs are left, and where each is."""

    def say(job: str, runs: int) -> None:
        click.echo(f"job {job}: {counted(runs, 'run')}", err=True)

    with alone(folder):
        runs = unsubmitted(folder, matrix)
        left = len(runs) - submit_runs(folder, matrix, runs, say)
    if left and not wait:
        click.echo(
            f"{left} runs wait: the site's max_queued_jobs is {matrix.site.max_queued_jobs}; "
            "submit again later, or with --wait",
            err=True,
        )
    return left, collect(folder, matrix) if wait else look(folder, matrix)


def _pending(state: RunState) -> bool:
    return state.phase not in ("recorded", "not submitted", "unreadable")


def _present(folder: Path, states: Sequence[RunState], as_json: bool) -> None:
    from tabulate import tabulate

    rows = [state.as_json() for state in states]
    body = [
        [row["run_id"], row["backend"], row["nodes"], row["world_size"], row["job"] or "-", row["phase"],
         row["state"] or "-", row["status"] or "-"]
        for row in rows
    ]  # fmt: skip
    headers = ("run", "backend", "nodes", "ranks", "job", "phase", "Slurm", "record")
    click.echo(tabulate(body, headers=headers, disable_numparse=True), err=as_json)
    counts = Counter(row["phase"] for row in rows)
    click.echo(", ".join(f"{count} {phase}" for phase, count in counts.items()), err=True)
    for problem in [state.problem for state in states if state.problem is not None]:
        click.echo(f"harness: {problem}", err=True)
    _tell_unknown_jobs(folder)
    if as_json:
        click.echo(json.dumps({"runs": rows}, indent=1))


def _tell_unknown_jobs(folder: Path) -> None:
    try:
        read_jobs(folder)
    except HarnessError as error:
        click.echo(f"harness: {error}", err=True)


def _report(matrix: Matrix, states: Sequence[RunState], report: Path) -> None:
    """A report of the matrix's records, and of those that other runs of the same cells left before."""
    from harness.report.report import write_report

    found = [
        (matrix.run_directory(state.run) / "record.json", state.record)
        for state in states
        if state.record is not None
    ]
    jobs = {record.job_id for _, record in found}
    own = {record.run_id for _, record in found}
    earlier = [
        (matrix.runs_folder / record.run_id / "record.json", record)
        for record in Store(matrix.runs_folder).records()[0]
        if record.job_id in jobs and record.run_id not in own and record.status == "ok"
    ]
    write_report([*earlier, *found], report)
    click.echo(f"report: {report}", err=True)
