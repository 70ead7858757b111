"""Options, exit codes and the treatment of errors that commands share.

Options that become something else are decorators: commands get the job, the checkpoint, the files, the view.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial, reduce, wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.output import View, echo
from harness.errors import HarnessError, shortened
from harness.files import STANDARD_OUTPUT
from harness.gpus.found import ON_THE_CPU, choose_device, find_gpus
from harness.job.experiment import Experiment, Price, read_price
from harness.launch import local_rank, require_rank_variables, speaks_for_ranks
from harness.run_directory.request import find_checkpoint
from harness.safe_text import described, encodable, inside

if TYPE_CHECKING:
    from harness.imported.rows import GivenRow
    from harness.plan.hardware import Device, Fabric, Hardware, TimeConstants
    from harness.record import GivenPart

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
            self.fail(f"{text!r} holds a zero byte, or bytes that are not UTF-8", parameter, context)
        if text == "-" and not self._stream:
            self.fail("'-' cannot be a standard stream here; give a path (a file of that name: './-')")
        return STANDARD_OUTPUT if text == "-" else Path(text)


PATH = _Path()
OUTPUT_FILE = _Path(stream=True)
"""Of a report: `-` is standard output."""


RANK_COMMANDS = ("run", "fabric")
"""Those that a launcher starts once for each rank: the first one speaks for all."""


def common(command: Callable[..., int], interrupted: str = "interrupted") -> Callable[..., None]:
    """Turn errors that a user can act on into one line and exit code 1."""

    @wraps(command)
    def guarded(**arguments: Any) -> None:
        try:
            if command.__name__ in RANK_COMMANDS:
                require_rank_variables()
            code = command(**arguments)
        except KeyboardInterrupt:
            echo(interrupted, err=True)
            code = EXIT_INTERRUPTED
        except click.UsageError:
            raise
        except Exception as error:
            if click.get_current_context().find_root().params.get("debug"):
                raise
            text, notes = described(error), ()
            if isinstance(error, HarnessError):
                notes = getattr(error, "__notes__", ())
            elif isinstance(error, OSError) and error.strerror:
                place = f"'{error.filename}': " if error.filename else ""
                text = shortened(place + error.strerror)
            elif isinstance(error, MemoryError):
                text = "there is too little memory: raise the limit of this process (ulimit -v), or free some"
            else:
                text = f"unexpected {type(error).__name__}: {text} (`harness --debug` shows the traceback)"
            if command.__name__ not in RANK_COMMANDS or speaks_for_ranks():
                for line in (text, *notes):
                    echo(f"harness: {' '.join(line.split())}", err=True)
            code = EXIT_ERROR
        sys.exit(code)

    return guarded


def measuring(command: Callable[..., int]) -> Callable[..., None]:
    """Wrap a command that records each run as it ends, as `common` does."""
    return common(command, "interrupted; what was measured so far is kept")


def _at_most_one(context: click.Context, parameter: click.Parameter, given: tuple[Path, ...]) -> Path | None:
    if len(given) > 1:
        raise click.BadParameter(f"{len(given)} files given; give one, and what differs from it with --set")
    if not given:
        return None
    from harness.shipped import resolve

    try:
        return resolve(given[0], "configs")
    except HarnessError as error:
        raise click.BadParameter(str(error)) from error


config_option = click.option("--config", type=PATH, multiple=True, callback=_at_most_one)
set_option = click.option("--set", "assignments", multiple=True, metavar="A.B=C")


def _no_code(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """Raises BadParameter for a file of Python, or a class or function in one: those are a setting."""
    file, _, name = (given or "").partition(":")
    if file.endswith(".py") or (name and Path(f"{file}.py").is_file()):
        raise click.BadParameter(f"'{given}' is code: give --set model.factory={file}:{name or 'CLASS'}")
    return given


model_option = click.option("--model", metavar="NAME|FOLDER|FILE", callback=_no_code)
backend_option = click.option("--backend")
backends_option = click.option("--backends")
nproc_option = click.option("--nproc", type=click.IntRange(1))
repeats_option = click.option("--repeats", type=click.IntRange(1))
runs_option = click.option("--runs", type=PATH, default=Path("runs"), show_default=True)
json_option = click.option("--json", "as_json", is_flag=True)
wide_option = click.option("--wide", is_flag=True)
quiet_option = click.option("-q", "--quiet", is_flag=True)


def resume_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command --resume-from and --trust-checkpoint, and pass the checkpoint as `resume`."""

    @click.option("--resume-from", metavar="RUN")
    @click.option("--trust-checkpoint", is_flag=True)
    @wraps(command)
    def with_checkpoint(resume_from: str | None, trust_checkpoint: bool, runs: Path, **arguments: Any) -> int:
        if trust_checkpoint and resume_from is None:
            raise HarnessError("--trust-checkpoint does nothing without --resume-from; give both")
        found = resume_from and find_checkpoint(resume_from, runs, trusted=trust_checkpoint)
        return command(resume=found or None, runs=runs, **arguments)

    return with_checkpoint


def passing(
    name: str, make: Callable[..., Any], *options: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., int]]:
    """Give a command these options, and pass as `name` what `make` makes of their values."""
    own = signature(make).parameters

    def decorate(command: Callable[..., Any]) -> Callable[..., int]:
        @wraps(command)
        def with_made(**arguments: Any) -> int:
            values = {key: arguments.pop(key) for key in own if key in arguments}
            return command(**{name: make(**values)}, **arguments)

        return reduce(lambda made, option: option(made), reversed(options), with_made)

    return decorate


def load_job(config: Path | None, assignments: tuple[str, ...], model: str | None) -> Experiment:
    """The job of --config, --model and --set, of which later ones go before earlier ones."""
    from harness.job.config import load_experiment

    of_model: tuple[str, ...] = ()
    if model is not None:
        from harness.plan.models import model_settings

        of_model = model_settings(model)
    return load_experiment(config, (*of_model, *assignments))


job_options = passing("experiment", load_job, config_option, model_option, set_option)


def warn_skipped(problems: Iterable[str]) -> None:
    """Name the records that cannot be read."""
    for problem in problems:
        echo(f"skipped: {problem}", err=True)


view_options = passing("view", View, wide_option, quiet_option)


DEFAULT_CPU_RANKS = 2


def split_backends(text: str) -> list[str]:
    """Split a list, by commas, or by spaces where names alone are given; 'key=value' pieces belong to the
    backend before them."""
    labels: list[str] = []
    for piece in filter(None, map(str.strip, text.split(",") if set(text) & {",", "="} else text.split())):
        if "=" in piece and ":" not in piece and labels:
            labels[-1] += f",{piece}"
        else:
            labels.append(piece)
    if not labels:
        raise HarnessError("--backends is empty; give names such as ddp,zero3,fsdp, or all")
    return labels


def numbers(text: str, option: str, unit: str) -> list[int]:
    """'2,4' as numbers, each once. Raises HarnessError."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        kind = "; the kind of GPU is --gpu" * (option == WORLD_SIZE and "x" in text.lower())
        raise HarnessError(f"{option} was given '{text}'; give numbers of {unit} such as 2 or 2,4{kind}")
    return list(dict.fromkeys(counts))


def default_ranks(device: str) -> int:
    """Default number of ranks on this machine: one per GPU, or two on the CPU."""
    return max(1, find_gpus().count) if device == "cuda" else DEFAULT_CPU_RANKS


def ranks_of(label: str, nproc: int | None, device: str) -> int:
    """Ranks of one backend on this machine. Raises HarnessError for several of the reference."""
    from harness.backends import registry

    if registry.parse(label)[0].name == registry.REFERENCE:
        if nproc not in (None, 1):
            raise HarnessError(f"--nproc {nproc}: '{label}' is one process; leave --nproc out")
        return 1
    return nproc or default_ranks(device)


def require_gpus(device: str, world_size: int) -> None:
    """Raise HarnessError if there are more ranks on CUDA than GPUs."""
    if device == "cuda" and world_size > (count := find_gpus().count):
        raise HarnessError(
            f"{world_size} ranks were asked for, but torch can use {count} GPUs here; lower --nproc or set "
            "runtime.device=cpu"
        )


def command_line() -> list[str]:
    """The command line to type to repeat this one."""
    return inside(Path.cwd(), ["harness", *sys.argv[1:]])


def resolve_device(asked: str, cpu_option: str = ON_THE_CPU) -> str:
    """'cpu' or 'cuda' for `runtime.device`. Raises HarnessError where GPUs cannot be used as they are.

    Writes to standard error why a run is on the CPU, where something speaks for GPUs.
    """
    chosen = choose_device(asked, cpu_option)
    if chosen.is_surprising and local_rank() == 0:
        echo(f"on the CPU: {chosen.why}", err=True)
    return chosen.name


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
        from harness.tell.sections.job import given_lines

        files = read_files(self.accelerate, self.deepspeed)
        job: Experiment = experiment
        rows: list[GivenRow] = []
        if self.mode != "exactly-as-given":
            job, rows = like_for_like(files, experiment)
        if self.mode != "like-for-like":
            rows += [exactly_as_given(file, experiment) for file in files]
        for row in rows:
            view.say("\n".join(given_lines(row.label, row.part)))
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
        from harness.plan.answer import set_texts
        from harness.tell.sections.job import planned_lines

        (read,) = read_files(self.accelerate, self.deepspeed, leaves_out=True)
        file = planned_file(read, experiment)
        return PlannedJob(
            experiment=file.experiment,
            assignments=(*assignments, *set_texts(file.settings)),
            backends=(file.backend,),
            remarks=tuple(planned_lines(file.part, file.refused)),
        )

    def only_row(
        self, backend: str | None, experiment: Experiment, view: View
    ) -> tuple[Experiment, str, GivenPart | None]:
        """Job, backend and file of one run, that of --backend or of a file. Raises HarnessError."""
        if self.count + (backend is not None) != 1:
            raise click.UsageError(
                "Give one of --backend, --from-accelerate and --from-deepspeed; compare takes several."
            )
        if backend is not None:
            from harness.launch.cells import canonical_label

            return experiment, canonical_label(backend), None
        (row,) = self.rows(experiment, view)[1]
        return row.experiment, row.label, row.part


def _given_files(
    from_accelerate: tuple[Path, ...], from_deepspeed: tuple[Path, ...], from_mode: str | None = None
) -> GivenFiles:
    files = GivenFiles(accelerate=from_accelerate, deepspeed=from_deepspeed, mode=from_mode or MODES[0])
    if from_mode and not files.count:
        raise click.UsageError("--from-mode needs --from-accelerate or --from-deepspeed")
    return files


_from_options = [
    click.option(name, multiple=True, type=PATH, metavar="FILE")
    for name in ("--from-accelerate", "--from-deepspeed")
]
file_options = passing("given", _given_files, *_from_options)
given_options = passing(
    "given", _given_files, *_from_options, click.option("--from-mode", type=click.Choice(MODES), default=None)
)


OPTION = "--price-per-gpu-hour"
price_option = click.option(OPTION, metavar="PRICE")


def given_price(text: str | None) -> Price | None:
    """The price of the option. Raises HarnessError."""
    if text is None:
        return None
    try:
        return Price.model_validate(read_price(text))
    except ValueError:
        raise HarnessError(
            f"{OPTION} '{text}' is not a price; give an amount and a currency: '2.5 USD'"
        ) from None


def named_fabric(known: Hardware, name: str | None) -> Fabric | None:
    """The network of `--fabric`, with a notice where another name than its own was given."""
    if name is None:
        return None
    fabric = known.fabric(name)
    if name.strip().lower() != fabric.name.lower():
        taken = f"taken as {fabric.name}, {fabric.bandwidth_per_gpu / 1e9:g} GB/s per GPU"
        echo(f"fabric '{name}' is {taken}; estimate --list hardware shows others", err=True)
    return fabric


calibrate_option = click.option("--calibrate", type=PATH, multiple=True, metavar="RUNS|FILE")


def calibrated_constants(
    calibrate: tuple[Path, ...], save: Path | None, device: Device | None
) -> TimeConstants | None:
    """The constants that the options ask for, with their error as a notice; None without the option.

    Raises HarnessError: no GPU named, another GPU, runs that cannot be used.
    """
    from harness.plan.calibration import calibrate as fit
    from harness.plan.calibration import (
        check_device,
        measured_cells,
        read_calibration,
        write_calibration,
    )

    if not calibrate:
        if save is not None:
            raise HarnessError("--save-calibration needs --calibrate RUNS; give the runs to calibrate on")
        return None
    if device is None:
        raise HarnessError("--calibrate needs the GPU that the runs were made on; name it with --gpu")
    saved = [path for path in calibrate if path.suffix == ".json"]
    if saved and len(calibrate) > 1:
        raise HarnessError(
            f"--calibrate {saved[0]} is a saved calibration and stands alone; give it, or runs to make one"
        )
    if saved:
        calibration = read_calibration(saved[0])
    else:
        cells = measured_cells(calibrate)
        check_device(cells[0].device.name, device)
        calibration = fit(cells)
    for line in calibration.not_used:
        echo(f"not used to calibrate: {line}", err=True)
    constants = calibration.time_constants(device)
    echo(f"time model {calibration.origin}", err=True)
    if save is not None:
        write_calibration(calibration, save)
    return constants


WORLD_SIZE = "--world-size / --gpus"
"""One option: click does not tell which name was typed."""


def ranks_options(command: Callable[..., Any], *, default: str | None = None) -> Callable[..., int]:
    """Add the numbers of ranks and how many a node has, and pass them as `world_size`, `gpus_per_node`."""
    # A default of None would be a value to click 8.3.
    given: dict[str, Any] = {"required": True} if default is None else {"default": default}
    of_node = click.option("--gpus-per-node", type=click.IntRange(1))
    return click.option("--world-size", "--gpus", metavar="N[,N...]", **given)(of_node(command))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a plan may run, as it was typed."""

    world_size: str
    gpus_per_node: int | None
    gpu: str | None
    fabric: str | None
    hardware: Path | None
    calibrate: tuple[Path, ...]
    save_calibration: Path | None = None

    @cached_property
    def known(self) -> Hardware:
        from harness.plan.hardware import load_hardware

        return load_hardware(self.hardware)

    @property
    def words(self) -> dict[str, object]:
        """What commands repeat of it, besides the number of ranks."""
        return {
            "--gpu": self.gpu, "--gpus-per-node": self.gpus_per_node, "--fabric": self.fabric,
            "--hardware": self.hardware,
        }  # fmt: skip

    def where(self) -> dict[str, Any]:
        """As `harness.plan.question.asked_of` takes it. Raises HarnessError."""
        from harness.plan.hardware import ranks_per_node

        device = None if self.gpu is None else self.known.device(self.gpu)
        return {
            "world_sizes": numbers(self.world_size, WORLD_SIZE, "ranks"),
            "ranks_per_node": ranks_per_node(device, self.gpus_per_node),
            "device": device,
            "fabric": named_fabric(self.known, self.fabric),
            "constants": calibrated_constants(self.calibrate, self.save_calibration, device),
        }


def machine_options(*, default: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., int]]:
    """Add ranks, GPU and network, passed as `machine`; without a default ranks and GPU are required."""

    return passing(
        "machine", Machine, partial(ranks_options, default=default),
        click.option("--gpu", metavar="NAME", required=default is None),
        click.option("--fabric", metavar="NAME"), click.option("--hardware", type=PATH, metavar="FILE"),
        calibrate_option,
    )  # fmt: skip
