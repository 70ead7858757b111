"""`harness slurm ...`: a matrix of cells as Slurm jobs."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from harness.cli import Group, options
from harness.cli.compare import force_option, show
from harness.cli.output import echo
from harness.errors import HarnessError
from harness.fabric.result import FABRIC_NAME, parse_rate, read_fabric, shortfall
from harness.job.config import only_elsewhere
from harness.job.experiment import Experiment
from harness.judge.wording import counted, listed
from harness.launch.cells import BOTH_KERNELS, canonical_label, have_both_kernels, reusable
from harness.plan.hardware import MemoryLimits
from harness.plan.preflight import CellPredictions
from harness.record.store import Store
from harness.safe_text import encodable
from harness.shipped import resolve
from harness.slurm import client, submission
from harness.slurm import matrix as matrices
from harness.slurm.submission import collect as collect_records
from harness.tell.formats import fitted

POLL_SECONDS = 10.0
"""The longest time between two looks at the queue, which begin within half a second."""
_run_directory = click.argument("run_directory", type=options.PATH)


@click.command(hidden=True)
@_run_directory
@options.common
def begin(run_directory: Path) -> int:
    """For job scripts: note that an attempt at a run begins."""
    submission.begin(run_directory)
    return 0


@click.command(hidden=True)
@_run_directory
@click.option("--exit-code", required=True, type=int)
@click.option("--ended", type=click.Choice(["time-limit", "terminated", "slow-fabric", "fabric-failed"]))
@click.option("--require-busbw", metavar="RATE")
@options.common
def finish(run_directory: Path, exit_code: int, ended: Any, require_busbw: str | None) -> int:
    """For job scripts: write the record of a run whose step has ended."""
    end = submission.ScriptEnd(
        ended=ended, exit_code=exit_code, require_busbw=require_busbw and encodable(require_busbw)
    )
    record = submission.finish(run_directory, end)
    echo(f"{record.run_id}: {record.status}", err=True)
    return 0


@click.command(hidden=True)
@_run_directory
@click.argument("rate")
@options.common
def gate(run_directory: Path, rate: str) -> int:
    """For job scripts: check the result of the network's self-test."""
    missed = shortfall(read_fabric(run_directory / FABRIC_NAME), parse_rate(rate))
    if missed is None:
        return 0
    echo(f"harness: {missed}", err=True)
    return options.EXIT_GATE


_folder = click.argument("folder", type=options.PATH)


def _site_options(command: Callable[..., int]) -> Callable[..., int]:
    for key, name in reversed(matrices.OPTIONS.items()):
        command = click.option(name, key)(command)
    return command


@click.group(cls=Group)
def slurm() -> None:
    """Run a matrix of cells as Slurm jobs."""


for command in (begin, finish, gate):
    slurm.add_command(command)


@slurm.command()
@options.common
@click.option("--site", required=True, type=options.PATH)
@options.job_options
@options.backends_option
@click.option("--nodes", default="1", show_default=True)
@click.option("--nproc", type=click.IntRange(1))
@options.runs_option
@click.option("-o", "--output", type=options.PATH, default=Path("jobs"), show_default=True)
@click.option("--job-name", default="harness", show_default=True)
@click.option("--array", "arrays", is_flag=True)
@_site_options
@click.option("--fresh", is_flag=True)
def render(
    site: Path,
    experiment: Experiment,
    backends: str | None,
    nodes: str,
    nproc: int | None,
    runs: Path,
    output: Path,
    job_name: str,
    arrays: bool,
    fresh: bool,
    **of_site: str | None,
) -> int:
    """Write the job scripts of backends x numbers of nodes x repeats."""
    where = matrices.with_options(matrices.load_site(resolve(site, "sites")), of_site)
    experiment = matrices.on_site(experiment, where)
    names = options.split_backends(backends) if backends is not None else experiment.compare.backends
    if names != ["all"]:
        names = [canonical_label(name) for name in names]
    per_node = nproc or where.gpus_per_node or options.DEFAULT_CPU_RANKS
    counts = options.numbers(nodes, "--nodes", "nodes")
    cells = matrices.plan_nodes(experiment, where, names, counts, per_node, experiment.compare.repeats)
    for missing in only_elsewhere(experiment.job()):
        echo(f"note: {missing} is not on this machine, so its contents are no part of the job's id", err=True)
    if have_both_kernels(cells):
        echo(BOTH_KERNELS, err=True)
    store = Store(runs)
    store.prepare()
    if not fresh:
        wanted = {cell.key for cell in cells}
        known = reusable(store.records()[0], wanted.__contains__)
        if known:
            echo(f"{len(known)} of {len(cells)} cells have a record", err=True)
        cells = [cell for cell in cells if cell.key not in known]
        if not cells:
            return 0
    matrix, scripts = matrices.render_matrix(
        cells, experiment, where, folder=output, runs_folder=runs, job_name=job_name, arrays=arrays,
        command=["harness", *sys.argv[1:]],
    )  # fmt: skip
    matrices.write_matrix(output, matrix, scripts)
    on_cpu = "" if where.gpus_per_node else f" for CPU ranks: gpus_per_node of site '{where.name}' is 0"
    said = f"{output}: {len(matrix.runs)} runs in {len(scripts)} scripts, {matrix.most_asked}{on_cpu}"
    if without := [name for name, script in scripts.items() if "#SBATCH --mem" not in script]:
        which = "" if len(without) == len(scripts) else f" of {listed(without, 3)}"
        said += f"; memory{which}: Slurm's default, often little: "
        said += "`memory_per_node` in the site file asks for more"
    echo(said, err=True)
    return 0


@slurm.command()
@_folder
@click.option("--wait", is_flag=True)
@force_option
@options.json_option
@options.common
def submit(folder: Path, wait: bool, force: bool, as_json: bool) -> int:
    """Submit the runs of a rendered folder that were not submitted yet."""
    matrix = matrices.read_matrix(folder)
    if (unfit := submission.unfit_software(matrix.site)) is not None:
        if not force:
            raise HarnessError(f"{unfit}; --force submits anyway")
        echo(unfit, err=True)
    judge = _Judge(matrix, submission.site_limits(matrix.site), force)
    pause = 0.5
    while True:
        try:
            left, states = _submit_some(folder, matrix, wait, judge)
        except (client.SlurmUnavailable, submission.AnotherSubmission) as error:
            if not wait:
                raise
            echo(f"{error}; asking again in {pause:g} s", err=True)
        else:
            if not wait or not (left or any(state.pending for state in states)):
                break
        time.sleep(pause)
        pause = min(POLL_SECONDS, 2 * pause)
    _present(folder, states, as_json)
    return 0


@slurm.command()
@_folder
@options.json_option
@options.common
def status(folder: Path, as_json: bool) -> int:
    """Show the state of each run."""
    _present(folder, submission.look(folder, matrices.read_matrix(folder)), as_json)
    return 0


@slurm.command()
@_folder
@options.json_option
@options.common
def collect(folder: Path, as_json: bool) -> int:
    """Write the record of every run whose job has ended, with what Slurm knows about it."""
    _present(folder, collect_records(folder, matrices.read_matrix(folder)), as_json)
    return 0


@slurm.command()
@_folder
@click.argument("run_ids", nargs=-1, metavar="[RUN]...")
@options.common
def cancel(folder: Path, run_ids: tuple[str, ...]) -> int:
    """Cancel the jobs of all runs, or of those named."""
    matrix = matrices.read_matrix(folder)
    states = submission.look(folder, matrix)
    unknown = set(run_ids) - {state.run.request.run_id for state in states}
    if unknown:
        raise HarnessError(
            f"run '{min(unknown)}' is not in this matrix: `harness slurm status {folder}` lists its runs"
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
    echo(f"cancelled {len(alive)} jobs; collect writes their records", err=True)
    return 0


class _Judge:
    """Predicts the memory of runs, each once and aloud."""

    def __init__(self, matrix: matrices.Matrix, limits: MemoryLimits, force: bool) -> None:
        self._matrix, self._limits, self._force = matrix, limits, force
        self._predicted: CellPredictions | None = None
        if force:
            submission.forget_refused(matrix)

    def accept(self, runs: Sequence[matrices.PlannedRun]) -> list[matrices.PlannedRun]:
        """Runs that may be submitted; the others get their records."""
        is_first = self._predicted is None
        if self._predicted is None:
            self._predicted = submission.predict_matrix(runs, self._limits, force=self._force)
            show(self._predicted)
        kept = submission.record_refused(self._matrix, runs, self._predicted)
        if is_first:
            asked = self._matrix.model_copy(update={"runs": kept}).most_asked
            echo(f"to submit: {counted(len(kept), 'run')}, {asked}", err=True)
        return kept


def _submit_some(
    folder: Path, matrix: matrices.Matrix, wait: bool, judge: _Judge
) -> tuple[int, list[submission.RunState]]:
    """Submit what the queue has room for; return how many runs are left and the state of each."""

    def say(job: str, runs: int) -> None:
        echo(f"job {job}: {counted(runs, 'run')}", err=True)

    with submission.alone(folder):
        runs = judge.accept(submission.unsubmitted(folder, matrix))
        left = len(runs) - submission.submit_runs(folder, matrix, runs, say)
    if left and not wait:
        echo(
            f"{left} runs wait: the site's max_queued_jobs is {matrix.site.max_queued_jobs}; "
            "submit again later, or with --wait",
            err=True,
        )
    return left, collect_records(folder, matrix) if wait else submission.look(folder, matrix)


def _present(folder: Path, states: Sequence[submission.RunState], as_json: bool) -> None:
    rows = [state.as_json() for state in states]
    body = [
        [row["run_id"], row["backend"], str(row["nodes"]), str(row["world_size"]), str(row["job"] or "-"),
         row["phase"], row["state"] or "-", row["status"] or "-"]
        for row in rows
    ]  # fmt: skip
    headers = ("run", "backend", "nodes", "ranks", "job", "phase", "Slurm", "record")
    echo(fitted(body, headers), err=as_json)
    counts = Counter(row["phase"] for row in rows)
    echo(", ".join(f"{count} {phase}" for phase, count in counts.items()), err=True)
    for problem in [state.problem for state in states if state.problem is not None]:
        echo(f"harness: {problem}", err=True)
    _tell_unknown_jobs(folder)
    if as_json:
        echo(json.dumps({"runs": rows}, indent=1))


def _tell_unknown_jobs(folder: Path) -> None:
    try:
        submission.read_jobs(folder)
    except HarnessError as error:
        echo(f"harness: {error}", err=True)
