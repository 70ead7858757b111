"""`harness observe`: measures a training script that is not the harness's."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli.options.arguments import command_line
from harness.cli.options.shared import json_option, measuring, runs_option, view_options
from harness.cli.terminal.output import View, echo
from harness.errors import HarnessError
from harness.job.experiment import MeasureSection
from harness.launch.observed_command import observe_command
from harness.record import Record
from harness.record.store import Store
from harness.safe_text import redacted


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("observed", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--warmup", type=click.IntRange(1), default=3, show_default=True, help="First steps, in no statistics."
)
@click.option(
    "--probed", type=click.IntRange(0), default=2, show_default=True,
    help="Steps after them whose memory and collectives are recorded, not timed.",
)  # fmt: skip
@click.option(
    "--cooldown", type=click.IntRange(0), default=3, show_default=True,
    help="Steps after those, in no statistics; all later ones are timed.",
)  # fmt: skip
@runs_option
@json_option
@measuring
@view_options
def observe(
    observed: tuple[str, ...], warmup: int, probed: int, cooldown: int, runs: Path, as_json: bool, view: View
) -> int:
    """Run a training script as it is, measure it from inside, and record it.

    OBSERVED is its command after `--`: torchrun, accelerate launch, deepspeed or python with their arguments.
    The exit code is the command's; 1 if it ended with 0 but trained nothing, 130 after Ctrl-C.
    """
    store = Store(runs)
    store.prepare()
    measure = MeasureSection(
        warmup_steps=warmup,
        probed_steps=probed,
        traced_steps=0,
        cooldown_steps=cooldown,
        weight_digests=False,
    )
    done = observe_command(observed, store, measure, command=command_line(), keeps_output_free=as_json)
    if done.record is not None:
        try:
            _present(done.record, store, as_json, view)
        except HarnessError as error:  # the exit code is the command's
            echo(f"harness: {error}", err=True)
    elif done.problem:
        echo(f"harness: the run has no record: {done.problem}", err=True)
    else:
        echo(
            f"harness: no process of '{redacted(observed[0])}' trained (exit code {done.exit_code}): nothing "
            "called backward() and stepped a torch optimizer, or Python ran with -E, -I or -S, or lacks the "
            "packages of the harness",
            err=True,
        )
    return done.exit_code if done.record is not None else done.exit_code or 1


def _present(record: Record, store: Store, as_json: bool, view: View) -> None:
    if as_json:
        echo(record.model_dump_json(indent=1))
    elif record.steps:
        from harness.judge.comparison import Comparison
        from harness.tell.terminal import terminal_table

        echo(terminal_table(Comparison([record]), wide=view.wide))
    if record.error is not None:
        whose = "" if record.error.rank is None else f"rank {record.error.rank}: "
        echo(f"harness: run {record.status}: {whose}{record.error.message}", err=True)
    view.say(f"record: {store.record_path(record)}")
