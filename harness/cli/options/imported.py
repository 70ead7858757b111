"""--from-accelerate, --from-deepspeed and --from-mode: rows from configuration files of other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options.shared import PATH
from harness.cli.terminal.output import View
from harness.errors import HarnessError
from harness.job.experiment import Experiment

if TYPE_CHECKING:
    from harness.imported.rows import GivenRow

MODES = ("exactly-as-given", "like-for-like", "both")


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """What is planned, with a file of another tool or without."""

    experiment: Experiment
    assignments: tuple[str, ...]
    """As `--set` takes them, with those of the file."""
    backends: tuple[str, ...] = ()
    """The file's."""
    remarks: tuple[str, ...] = ()
    """What was taken from the file, and what was not."""


@dataclass(frozen=True, kw_only=True)
class GivenFiles:
    """Files that a command line names, and how their rows are run."""

    accelerate: tuple[Path, ...]
    deepspeed: tuple[Path, ...]
    mode: str

    @property
    def count(self) -> int:
        return len(self.accelerate) + len(self.deepspeed)

    def rows(self, experiment: Experiment, view: View) -> tuple[Experiment, list[GivenRow]]:
        """The job of all other rows, and the rows of the files; shows what became of each key.

        Raises HarnessError for a file that cannot be a row.
        """
        if not self.count:
            return experiment, []
        from harness.imported.rows import exactly_as_given, like_for_like, read_files

        files = read_files(self.accelerate, self.deepspeed)
        job: Experiment = experiment
        rows: list[GivenRow] = []
        if self.mode != "exactly-as-given":
            job, rows = like_for_like(files, experiment)
        if self.mode != "like-for-like":
            rows += [exactly_as_given(file, experiment) for file in files]
        _show(rows, view)
        return job, rows

    def planned(self, experiment: Experiment, assignments: tuple[str, ...]) -> PlannedJob:
        """The job of a plan, with what it takes from the only file. Raises HarnessError for several.

        `assignments`: as typed.
        """
        if not self.count:
            return PlannedJob(experiment=experiment, assignments=assignments)
        if self.count > 1:
            raise HarnessError(f"{self.count} files are given; a plan takes one, compare takes several")
        from harness.imported.rows import planned_file, read_files
        from harness.plan.command_words import set_texts
        from harness.tell.sections.job import planned_lines

        (read,) = read_files(self.accelerate, self.deepspeed, leaves_out=True)
        file = planned_file(read, experiment)
        return PlannedJob(
            experiment=file.experiment,
            assignments=(*assignments, *set_texts(file.settings)),
            backends=(file.backend,),
            remarks=tuple(planned_lines(file.part, file.refused)),
        )

    def only_row(self, backend: str | None, experiment: Experiment, view: View) -> GivenRow | None:
        """The row that `harness run` runs; None: that of --backend. Raises HarnessError."""
        if self.count + (backend is not None) != 1:
            raise click.UsageError(
                "Give one of --backend, --from-accelerate and --from-deepspeed; compare takes several."
            )
        if self.mode == "both":
            raise HarnessError(
                "--from-mode both makes two runs; give like-for-like or exactly-as-given, or use "
                "`harness compare`"
            )
        return next(iter(self.rows(experiment, view)[1]), None)


def given_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options, and pass them as `given`."""

    @click.option(
        "--from-accelerate", multiple=True, type=PATH, metavar="FILE",
        help="Add a row with the settings of an Accelerate configuration; repeatable.",
    )  # fmt: skip
    @click.option(
        "--from-deepspeed", multiple=True, type=PATH, metavar="FILE",
        help="Add a row with the settings of a DeepSpeed configuration; repeatable.",
    )  # fmt: skip
    @click.option(
        "--from-mode", type=click.Choice(MODES), default=None,
        help="Whether the settings of a file win over job and preset (the default), or lose to them.",
    )  # fmt: skip
    @click.option(
        "--like-for-like", is_flag=True,
        help="Rows of files train the job of the other rows under their preset: --from-mode like-for-like.",
    )  # fmt: skip
    @wraps(command)
    def with_files(
        from_accelerate: tuple[Path, ...], from_deepspeed: tuple[Path, ...], from_mode: str | None,
        like_for_like: bool, **arguments: Any,
    ) -> int:  # fmt: skip
        asked = "--like-for-like" if like_for_like else "--from-mode"
        if (from_mode or like_for_like) and not from_accelerate and not from_deepspeed:
            raise click.UsageError(f"{asked} needs --from-accelerate or --from-deepspeed")
        if like_for_like and from_mode not in (None, "like-for-like"):
            raise click.UsageError(f"--like-for-like and --from-mode {from_mode} exclude each other")
        mode = "like-for-like" if like_for_like else from_mode or MODES[0]
        given = GivenFiles(accelerate=from_accelerate, deepspeed=from_deepspeed, mode=mode)
        return command(given=given, **arguments)

    return with_files


def planned_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command that plans --from-accelerate and --from-deepspeed, and pass them as `given`."""

    @click.option(
        "--from-accelerate", multiple=True, type=PATH, metavar="FILE",
        help="Plan with the settings of an Accelerate configuration.",
    )  # fmt: skip
    @click.option(
        "--from-deepspeed", multiple=True, type=PATH, metavar="FILE",
        help="Plan with the settings of a DeepSpeed configuration.",
    )  # fmt: skip
    @wraps(command)
    def with_files(
        from_accelerate: tuple[Path, ...], from_deepspeed: tuple[Path, ...], **arguments: Any
    ) -> int:
        given = GivenFiles(accelerate=from_accelerate, deepspeed=from_deepspeed, mode=MODES[0])
        return command(given=given, **arguments)

    return with_files


def _show(rows: Sequence[GivenRow], view: View) -> None:
    from harness.tell.sections.job import given_lines

    for row in rows:
        view.say("\n".join(given_lines(row.label, row.part)))
