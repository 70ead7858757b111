"""Options, exit codes and the treatment of errors that commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import completion
from harness.cli.terminal.output import View, echo
from harness.errors import HarnessError
from harness.files import STANDARD_OUTPUT
from harness.launch import speaks_for_ranks
from harness.run_directory.request import Resume
from harness.run_directory.resume import find_checkpoint
from harness.safe_text import described, encodable

if TYPE_CHECKING:
    from harness.job.experiment import Experiment

EXIT_ERROR = 1
EXIT_STRICT = 3
EXIT_GATE = 3
EXIT_INTERRUPTED = 130


class _Path(click.Path):
    """A path that a file system can have; `-` is standard output or refused, never a file of that name."""

    def __init__(self, *, stream: bool = False) -> None:
        super().__init__()
        self._stream = stream

    def convert(
        self, value: str | os.PathLike[str], parameter: click.Parameter | None, context: click.Context | None
    ) -> Path:
        text = os.fspath(value)
        if "\0" in text or encodable(text) != text:
            self.fail(f"{text!r} holds a character that no path can have", parameter, context)
        if text == "-" and not self._stream:
            self.fail("'-' cannot be a standard stream here; give a path (a file of that name: './-')")
        return STANDARD_OUTPUT if text == "-" else Path(text)


PATH = _Path()
OUTPUT_FILE = _Path(stream=True)
"""Of a report: `-` is standard output."""


def common(command: Callable[..., int]) -> Callable[..., None]:
    """Turn errors that a user can act on into one line and exit code 1."""
    return _guarded(command, "interrupted")


def measuring(command: Callable[..., int]) -> Callable[..., None]:
    """The same for a command that records each run as it ends."""
    return _guarded(command, "interrupted; what was measured so far is kept")


RANK_COMMANDS = ("run", "fabric")
"""Those that a launcher starts once for each rank: the first one speaks for all."""


def _guarded(command: Callable[..., int], interrupted: str) -> Callable[..., None]:

    @wraps(command)
    def guarded(debug: bool, **arguments: Any) -> None:
        from harness.errors import HarnessError

        try:
            code = command(**arguments)
        except KeyboardInterrupt:
            echo(interrupted, err=True)
            code = EXIT_INTERRUPTED
        except click.UsageError:
            raise
        except Exception as error:
            if debug:
                raise
            text = described(error)
            if isinstance(error, OSError) and error.strerror:
                text = f"'{error.filename}': {error.strerror}" if error.filename else error.strerror
            elif not isinstance(error, HarnessError):
                text = f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)"
            notes = getattr(error, "__notes__", ()) if isinstance(error, HarnessError) else ()
            if command.__name__ not in RANK_COMMANDS or speaks_for_ranks():
                for line in (text, *notes):
                    echo(f"harness: {' '.join(line.split())}", err=True)
            code = EXIT_ERROR
        sys.exit(code)

    return click.option("--debug", is_flag=True, help="Show the traceback of an error.")(guarded)


def _at_most_one(context: click.Context, parameter: click.Parameter, given: tuple[Path, ...]) -> Path | None:
    if len(given) > 1:
        raise click.BadParameter(f"{len(given)} files given; give one, and what differs from it with --set")
    if not given:
        return None
    from harness.errors import HarnessError
    from harness.shipped import resolve

    try:
        return resolve(given[0], "configs")
    except HarnessError as error:
        raise click.BadParameter(str(error)) from error


BACKENDS = "Comma-separated names with their options, or all."
MODEL = "Name or hub id of the catalogue, folder with config.json, or its file"
config_option = click.option(
    "--config",
    type=PATH,
    multiple=True,
    callback=_at_most_one,
    shell_complete=completion.configuration,
    help="YAML file, or @NAME for one that is shipped, such as @default; default: the built-in job.",
)
set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="A.B=C",
    help="Override a setting; repeatable.",
    shell_complete=completion.setting,
)
model_option = click.option(
    "--model", metavar="NAME|FOLDER|FILE", help=f"{MODEL}, with random weights; default: the job's."
)
backends_option = click.option(
    "--backends", help=BACKENDS,
    shell_complete=completion.backends,
)  # fmt: skip
repeats_option = click.option("--repeats", type=click.IntRange(1), help="Runs of each cell.")
runs_option = click.option(
    "--runs", type=PATH, default=Path("runs"), show_default=True,
    help="Folder of the records.",
)  # fmt: skip
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on standard output."
)
wide_option = click.option("--wide", is_flag=True, help="Show every column, however long the lines.")
port_option = click.option(
    "--port", type=click.IntRange(1, 65535), help="Rendezvous port; default: a free port."
)
resume_option = click.option(
    "--resume-from", metavar="RUN", help="Continue the kept checkpoint of a run: its id, or a folder."
)
trust_option = click.option(
    "--trust-checkpoint", is_flag=True,
    help="Load a native checkpoint that you did not save: it can execute any code.",
)  # fmt: skip
trace_option = click.option(
    "--trace", is_flag=True, help="Keep each rank's profiler trace (measure.trace=true)."
)


def found_checkpoint(given: str | None, runs: Path, *, trusted: bool) -> Resume | None:
    """The checkpoint that --resume-from names; raises HarnessError."""
    if given is None:
        if trusted:
            raise HarnessError("--trust-checkpoint does nothing without --resume-from; give both")
        return None
    return find_checkpoint(given, runs, trusted=trusted)


def load_job(config: Path | None, assignments: tuple[str, ...], model: str | None) -> Experiment:
    """The job of --config, --model and --set, of which later ones go before earlier ones."""
    from harness.job.config import load_experiment

    of_model: tuple[str, ...] = ()
    if model is not None:
        from harness.plan.models import model_settings

        of_model = model_settings(model)
    return load_experiment(config, (*of_model, *assignments))


def with_trace(assignments: tuple[str, ...], trace: bool) -> tuple[str, ...]:
    """Add the setting that --trace stands for to those given with --set."""
    return (*assignments, "measure.trace=true") if trace else assignments


def warn_skipped(problems: Iterable[str]) -> None:
    """Name the records that cannot be read."""
    for problem in problems:
        echo(f"skipped: {problem}", err=True)


def view_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command -q, -v and --wide, and pass them as `view`."""

    @wide_option
    @click.option("-q", "--quiet", is_flag=True, help="Show results, findings and errors only.")
    @click.option("-v", "--verbose", is_flag=True, help="Show steps of each run and which records are used.")
    @wraps(command)
    def with_view(wide: bool, quiet: bool, verbose: bool, **arguments: Any) -> int:
        if quiet and verbose:
            raise click.UsageError("-q and -v exclude each other")
        return command(view=View(wide=wide, quiet=quiet, verbose=verbose), **arguments)

    return with_view
