"""The command line, the only place that prints. Results go to standard output, the rest to standard error."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from harness.cli.working import working
from harness.import_path import leave_current_folder


class LazyGroup(click.Group):
    """Command NAME is the object NAME in the module NAME of `package`; `summaries` has a line for each."""

    def __init__(self, *arguments: Any, package: str, summaries: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._package = package
        # In place of the commands wherever only their names or lines are wanted.
        self.commands = {name: click.Command(name, help=summary) for name, summary in summaries.items()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None if there is none of this name."""
        if cmd_name not in self.commands:
            return None
        command = getattr(import_module(f"{self._package}.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        give_example(command, cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands with their lines; click would import each of them."""
        offered = [
            CompletionItem(name, help=self.commands[name].get_short_help_str())
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return [*offered, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their lines, shortened as click shortens them."""
        width = formatter.width - 6 - max(map(len, self.commands))
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(width)) for name in self.list_commands(ctx)]
            )


COMMANDS = {
    "backends": "List the backends with their options and library versions.",
    "clean": "Remove runs that no comparison would reuse: failed, stopped or replaced by a later run.",
    "compare": "Run the missing cells of backends x world sizes x repeats and compare them all.",
    "diagnose": "Explain why two runs differ, given their folders.",
    "doctor": "Show what this machine can run, known problems of its versions, and whether to trust results.",
    "estimate": "Predict memory, communication, speed and cost of a job by strategy, without GPUs.",
    "explain": "Explain a finding: its cause, how to confirm it and the fix.",
    "export": "Export records to other tools, or what was measured to a program of your own.",
    "fabric": "Measure the network that collectives use, and check its bus bandwidth.",
    "fit": "Find the largest micro-batch that fits, and the fastest one.",
    "init": "Write a configuration file with every setting, its meaning and its default.",
    "labs": "List, run and tabulate labs: jobs of public courses and talks.",
    "list": "List the runs of a folder, oldest first, with status and figures.",
    "observe": "Run a training script as it is, measure it from inside, and record it.",
    "recommend": "Rank strategies, batches, checkpointing and offload for a model on GPUs.",
    "report": "Write a report of records: files, run folders, folders of runs, or archives (runs.tar.xz).",
    "run": "Run one job under one backend and record it.",
    "settings": "List the settings of a configuration file or SECTION with type, default and meaning.",
    "show": "Show one run: how it ended, its figures, and the settings that differ from the defaults.",
    "simulate": "Run a backend's code as one rank of a large job, and count memory and traffic.",
    "slurm": "Run a matrix of cells as Slurm jobs.",
    "snapshot": "Show what was alive at the peak of a CUDA memory snapshot, and whose it was.",
    "trace": "Show where the time of traces went: computing, communicating, copying, idling.",
    "verify": "Recompute a report from its records and list every line that differs.",
}
"""Commands, each in the module of its name, with the first sentence of its help."""


EXAMPLES = {
    "backends": "harness backends --json",
    "clean": "harness clean runs --yes",
    "compare": "harness compare --backends ddp,zero3,fsdp --nproc 2 --report report.md",
    "diagnose": "harness diagnose runs/RUN_A runs/RUN_B",
    "doctor": "harness doctor --gpu",
    "estimate": "harness estimate --model llama-3.1-8b --world-size 8 --gpu H100-80",
    "explain": "harness explain slow-rank",
    "export accelerate": "harness export accelerate --backend fsdp --nproc 2 -o program",
    "export adapter": "harness export adapter runs/RUN -o adapter",
    "export deepspeed": "harness export deepspeed --backend zero3 --nproc 2 -o program",
    "export torchrun": "harness export torchrun --backend fsdp --nproc 2 -o program",
    "export tracking": "harness export tracking runs --to tensorboard -o tracking",
    "fabric": "harness fabric --nproc 2 -o fabric.json",
    "fit": "harness fit --backend zero2 --nproc 2",
    "init": "harness init job.yaml",
    "labs list": "harness labs list",
    "labs run": "harness labs run llama-finetuning",
    "labs table": "harness labs table llama-finetuning",
    "list": "harness list runs",
    "observe": "harness observe -- torchrun --nproc-per-node 2 train.py",
    "recommend": "harness recommend --model llama-3.1-8b --gpus 8 --gpu H100-80 --tokens-per-step 4M",
    "report": "harness report runs -o report.md",
    "run": "harness run --backend zero3 --nproc 2",
    "settings": "harness settings training",
    "show": "harness show runs/RUN",
    "simulate": "harness simulate --backend zero3 --world-size 1024 --model llama-3.1-8b",
    "slurm cancel": "harness slurm cancel jobs",
    "slurm collect": "harness slurm collect jobs",
    "slurm render": "harness slurm render --site @ibex --nodes 1,2",
    "slurm status": "harness slurm status jobs",
    "slurm submit": "harness slurm submit jobs",
    "snapshot": "harness snapshot snapshot.pickle",
    "trace": "harness trace trace-rank0.json.gz trace-rank1.json.gz",
    "verify": "harness verify report.md",
}
"""With which the help of each command begins."""


def give_example(command: click.Command, words: str) -> None:
    """Let the help of a command, or of those of a group, begin with its example."""
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            give_example(part, f"{words} {name}")
    if words not in EXAMPLES:
        return

    def format_help_text(ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n  $ {EXAMPLES[words]}\n")
        click.Command.format_help_text(command, ctx, formatter)

    command.format_help_text = format_help_text  # type: ignore[method-assign]


def main() -> None:
    """Entry point of the `harness` command."""
    leave_current_folder()
    words = sys.argv[1:]
    is_silent = not words or words[0] not in COMMANDS or not {"-q", "--quiet"}.isdisjoint(words)
    # A terminated launcher must stop its ranks and write their record, as for Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with contextlib.nullcontext() if is_silent else working(words[0]):
        harness(prog_name="harness")


@click.group(
    cls=LazyGroup,
    package=__name__,
    summaries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="sharding-harness")
def harness() -> None:
    """Run one fine-tuning job under every data-parallel sharding strategy and compare what happened."""
