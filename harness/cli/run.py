"""`harness run`: one run, or one rank of it under a launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from harness import launch
from harness.cli import OBSERVED, options
from harness.cli.compare import force_option, open_store, predict_one, refuse_as_rank
from harness.cli.output import Progress, View, echo
from harness.errors import HarnessError
from harness.job.batch import job_layout
from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from harness.launch.cells import begin_run, make_cell
from harness.launch.external import supervise
from harness.launch.launcher import (
    LocalLauncher,
    launcher_settings,
    modules_to_preload,
    running_cell,
    whole,
)
from harness.launch.observed_command import observe_command
from harness.record import GivenPart, Record
from harness.record.store import Store
from harness.run_directory.request import Resume, RunRequest
from harness.safe_text import redacted


@click.command()
@options.measuring
@options.backend_option
@options.job_options
@options.nproc_option
@options.runs_option
@force_option
@options.resume_options
@options.json_option
@options.quiet_option
@options.file_options
def run(
    backend: str | None,
    experiment: Experiment,
    nproc: int | None,
    runs: Path,
    force: bool,
    resume: Resume | None,
    as_json: bool,
    quiet: bool,
    given: options.GivenFiles,
) -> int:
    """Run one job under one backend and record it.

    Starts the ranks itself, or becomes one of them under torchrun or accelerate launch.
    """
    view = View(quiet=quiet)
    experiment, label, part = given.only_row(backend, experiment, view)
    device = options.resolve_device(experiment.runtime.device)
    if launch.started_as_rank():
        store = Store(runs)
        return _run_as_rank(experiment, label, device, store, nproc, force, as_json, view, resume, part)
    world_size = options.ranks_of(label, nproc, device)
    options.require_gpus(device, world_size)
    layout = job_layout([label], world_size, experiment.training)
    view.begin("checking the job, its data and this machine")
    cell = make_cell(experiment, label, world_size, layout, 0, device, resume=resume, given=part)
    store = open_store(runs)
    launcher = LocalLauncher(device, modules_to_preload(experiment, [label]))
    facts = launcher.check(cell.job.model_dump_json())
    prediction = predict_one(cell, facts, experiment, launcher, force=force, shows=not view.quiet)
    progress = Progress(label, cell.data_size, sys.stderr, plain_lines=not view.quiet, bar=not view.quiet)
    try:
        record = whole(
            running_cell(
                cell, store, launcher, command=options.command_line(), on_event=progress,
                prediction=prediction,
            )
        )  # fmt: skip
    finally:
        progress.close()
    return _present_run(record, store, as_json, view)


def _run_as_rank(
    experiment: Experiment, label: str, device: str, store: Store, nproc: int | None, force: bool,
    as_json: bool, view: View, resume: Resume | None, part: GivenPart | None,
) -> int:  # fmt: skip
    """Become one rank of a run that torchrun or accelerate launch started."""
    world_size = launch.external_world_size()
    if nproc is not None:
        raise HarnessError(
            f"--nproc {nproc} would be ignored: the launcher started {world_size} ranks; leave it out"
        )
    layout = job_layout([label], world_size, experiment.training)
    store.prepare()
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # libraries would prefer a GPU that they see

    def request(*, reads_files: bool = launch.local_rank() == 0) -> RunRequest:
        # Rank 0's cell counts: one rank of a node is enough to read a large model's files.
        per_node = launch.external_ranks_per_node()
        cell = make_cell(
            experiment, label, world_size, layout, 0, device, ranks_per_node=per_node,
            resume=resume if reads_files else None, reads_files=reads_files, given=part,
        )  # fmt: skip
        asked = begin_run(
            cell, ["torchrun", "--nproc-per-node", str(per_node), "-m", *options.command_line()]
        )
        return asked.model_copy(update={"launcher_settings": launcher_settings(os.environ)})

    own = request()  # before the fork, which is for processes without threads
    if launch.local_rank() == 0:
        refuse_as_rank(own, force=force)

    def become_rank(tell: Callable[[str], object]) -> int:
        from harness.rank.external import run_external

        record, code = run_external(own, store.root, tell)
        if record is not None and launch.external_rank() == 0:
            code = _present_run(record, store, as_json, view)
        return code

    supervisor = supervise(launch.external_rank(), world_size, store.root, become_rank)
    record = supervisor.missing_record() or supervisor.early_record(lambda: request(reads_files=True))
    if record is not None:
        try:
            _present_run(record, store, as_json, view)
        except HarnessError as error:  # of which the first rank alone shows its own otherwise
            if launch.external_rank() != 0:
                echo(f"harness: {error}", err=True)
            raise
    supervisor.leave()
    return 1


def _present_run(record: Record, store: Store, as_json: bool, view: View) -> int:
    if record.error is not None and record.error.kind == "JobError":
        store.discard(record.run_id)
        where = "" if record.error.rank is None else f" (rank {record.error.rank})"
        raise HarnessError(f"{record.error.message}{where}")
    if as_json:
        echo(record.model_dump_json(indent=1))
    path = store.record_path(record)
    if record.status == "unsupported":
        raise HarnessError(
            f"backend '{record.backend.label}' is unsupported here: {'; '.join(record.reasons)} "
            f"(record: {path})"
        )
    if record.status != "ok":
        from harness.judge.rows import reason

        raise HarnessError(f"run {record.status}: {reason(record)} (record and logs: {path.parent})")
    if not as_json:
        _show(record)
    view.say(f"record: {path}")
    return 0


def _show(record: Record) -> None:
    from harness.judge.comparison import Comparison
    from harness.tell.terminal import terminal_text

    echo(terminal_text(Comparison([record])))


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("observed", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--label", default="", help="Name of the run's row; runs of one name and training repeat it.")
@options.set_option
@options.runs_option
@options.json_option
@options.measuring
def observe(
    observed: tuple[str, ...], label: str, assignments: tuple[str, ...], runs: Path, as_json: bool
) -> int:
    """Run a training script as it is, measure it from inside, and record it.

    OBSERVED is its command after `--`: torchrun, accelerate launch, deepspeed or python with their arguments.
    The exit code is the command's; 1 if it ended with 0 but trained nothing, 130 after Ctrl-C.
    """
    from harness.cli.scripts import of_script

    if label and not (label.strip() and label.isprintable()):
        raise HarnessError(f"--label was given {label!r}; give a name of one line")
    store = Store(runs)
    store.prepare()
    if ignored := [text for text in assignments if text.partition("=")[0] not in OBSERVED]:
        raise HarnessError(
            f"--set {ignored[0]} would be ignored: the script decides; observe takes {', '.join(OBSERVED)}"
        )
    measure = of_script(load_experiment(None, assignments)).measure
    done = observe_command(
        observed, store, measure, command=options.command_line(), keeps_output_free=as_json, label=label
    )
    if done.record is not None:
        try:
            _present(done.record, store, as_json, View())
        except HarnessError as error:  # the exit code is the command's
            echo(f"harness: {error}", err=True)
    elif done.problem:
        echo(f"harness: the run has no record: {done.problem}", err=True)
    else:
        why = (
            "it failed before; what it printed says why"
            if done.exit_code
            else "nothing called backward() and stepped a torch optimizer, or Python ran with -E, -I or -S, "
            "or lacks the packages of the harness"
        )
        echo(
            f"harness: no process of '{redacted(observed[0])}' trained (exit code {done.exit_code}): {why}",
            err=True,
        )
    return done.exit_code if done.record is not None else done.exit_code or 1


def _present(record: Record, store: Store, as_json: bool, view: View) -> None:
    if as_json:
        echo(record.model_dump_json(indent=1))
    elif record.steps:
        _show(record)
    if record.error is not None:
        whose = "" if record.error.rank is None else f"rank {record.error.rank}: "
        echo(f"harness: run {record.status}: {whose}{record.error.message}", err=True)
    view.say(f"record: {store.record_path(record)}")
