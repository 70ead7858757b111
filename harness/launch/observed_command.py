"""Runs a command whose Python processes measure themselves, and writes the record of what they did."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from harness.backends.base import Unsupported
from harness.bounds import MOST_DOCUMENT_BYTES, MOST_RECORD_BYTES
from harness.errors import HarnessError
from harness.files import read_plain
from harness.import_path import given_environment
from harness.job.experiment import Limits, MeasureSection
from harness.launch.bootstrap.sitecustomize import PACKAGES, PROCESSES, RUN_DIRECTORY
from harness.launch.ending import die_with, leaving_none_behind
from harness.launch.owner import forget_owner, note_owner
from harness.record import ErrorPart, Record, Status
from harness.record.store import Store, archive_of, as_name, keep_record
from harness.run_directory import observed_record
from harness.run_directory.assemble import INTERRUPTED
from harness.run_directory.rank_state import log_tail, read_log
from harness.run_directory.request import launcher_log
from harness.safe_text import described, redacted

BOOTSTRAP = Path(__file__).parent / "bootstrap"
ROOT = Path(__file__).resolve().parents[2]


ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)
INTERRUPT_SECONDS = 5.0
"""So long after a SIGINT that came from no terminal the command may end, before it is passed on."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """How an observed command ended."""

    record: Record | None
    """None: no process of it trained, or there is a problem."""
    exit_code: int
    """For the shell: the command's own; 128 + its number after a signal that it did not answer otherwise."""
    problem: str = ""
    """Why there is no record of a command that trained."""


def observe_command(
    observed: Sequence[str],
    store: Store,
    measure: MeasureSection,
    *,
    command: Sequence[str],
    keeps_output_free: bool,
    label: str = "",
) -> Observed:
    """Run `observed` to its end and record it.

    Standard streams, the working directory and the environment are the command's own; Ctrl-C reaches it from
    the terminal. `keeps_output_free`: its standard output goes to standard error. Raises HarnessError if it
    cannot be started.
    """
    request, directory = _begin(observed, store, measure, command, label=label)
    try:
        output = sys.stderr.fileno() if keeps_output_free else None
        process = subprocess.Popen(
            observed, env=observed_environment(directory), stdout=output,
            preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
        )  # fmt: skip
    except OSError as error:
        store.discard(request.run_id)
        said = f"'{redacted(observed[0])}' cannot be started: {error.strerror}"
        raise HarnessError(f"{said}; {_instead(observed[0])}") from error
    code, told, told_at = _followed_to_its_end(process)
    with suppress(OSError):
        observed_record.note_end(directory, process.pid, code)
    exit_code = code if code >= 0 else 128 - code
    # Launchers end with 1, or by another signal, where their ranks were told to end.
    if told is not None and (code < 0 or code == 1):
        exit_code = 128 + told
    problem = ""
    try:
        observed_record.wait_for_processes(directory)
        record = observed_record.assemble_observed(directory, request, code, told_at)
        if record is None:
            problem = _why_unwritten(directory)
            if code < 0 and not problem:
                problem = f"signal {-code} ({signal.strsignal(-code)}) ended the command before it trained"
            store.discard(request.run_id)
        else:
            record = _kept(directory, record)
    except (OSError, ValueError, HarnessError) as error:  # the command has ended: its exit code counts
        return Observed(record=None, exit_code=exit_code, problem=described(error))
    return Observed(record=record, exit_code=exit_code, problem=problem)


def _why_unwritten(directory: Path) -> str:
    """What kept a command from writing what was observed; empty: nothing is known to."""
    if not directory.is_dir():
        return f"{directory} was removed, moved or replaced while it ran"
    events = directory.glob("rank-*.jsonl")
    cut = next((file for file in events if not read_plain(file, MOST_RECORD_BYTES).endswith(b"\n")), None)
    return "" if cut is None else f"{cut} could not be written: a full disk, or a limit (`ulimit -f`)"


def _instead(word: str) -> str:
    """What to do with a word that cannot be started; one without a slash was looked for on PATH."""
    path = Path(word)
    if path.suffix == ".py":
        return "put python or torchrun in front of it"
    if not (path.exists() if "/" in word else path.is_file()):
        return "activate the environment that has it"
    if path.is_dir() or archive_of(path):
        return f"for its runs: `harness list --runs {path}`"
    return "make it executable, or put what runs it in front; dumps: `harness trace`, `snapshot` or `hang`"


MOST_FILES = 1000
"""More are not read: the sources of an installed package that stands beside a script."""


def files_of(command: Sequence[str]) -> dict[str, str]:
    """Digest of the contents by word that names a file, and by file beside a script that it imports.

    Not of those that are too large for a script or cannot be read, of imports whose names the script
    computes, and beyond the first MOST_FILES.
    """
    found: dict[str, str] = {}
    waiting = [(Path(word), Path(word).parent) for word in command]
    known = {file for file, _ in waiting}
    for file, folder in waiting:  # which grows
        if len(found) == MOST_FILES:
            break
        with suppress(OSError, ValueError):
            content = read_plain(file, MOST_DOCUMENT_BYTES)
            found[str(file)] = hashlib.sha256(content).hexdigest()
            for other in _imported(content, file, folder) if file.suffix == ".py" else ():
                if other not in known:
                    known.add(other)
                    waiting.append((other, folder))
    return found


def _imported(content: bytes, file: Path, folder: Path) -> Iterator[Path]:
    """Where what a file imports may stand in the folder; packages with and without `__init__.py`."""
    nodes: Iterable[ast.AST] = ()
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = ast.walk(ast.parse(content))
    for node in nodes:
        names, level = [], 0
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            level, module = node.level, f"{node.module}." if node.module else ""
            names = [module + alias.name for alias in node.names]
        top = file.parents[min(level, len(file.parents)) - 1] if level else folder
        for parts in (name.split(".") for name in names):
            for depth in range(1, len(parts) + 1):
                place = top.joinpath(*parts[:depth])
                yield place.with_name(f"{place.name}.py")
                yield place / "__init__.py"


def _begin(
    observed: Sequence[str],
    store: Store,
    measure: MeasureSection,
    command: Sequence[str],
    row: observed_record.ScriptRow | None = None,
    label: str = "",
) -> tuple[observed_record.ObserveRequest, Path]:
    """What its processes are asked to measure, and the new folder of the run that says so."""
    now = datetime.now(UTC)
    name = as_name(redacted(Path(observed[0]).name if row is None else row.label))
    request = observed_record.ObserveRequest(
        run_id=f"{now.strftime('%Y%m%d-%H%M%S')}-observed-{name}-{secrets.token_hex(3)}",
        created_at=now.isoformat(timespec="milliseconds"),
        command=list(command),
        observed=list(observed),
        files=files_of(observed),
        label=label,
        measure=measure,
        row=row,
    )
    directory = store.run_directory(request.run_id).resolve()
    request.write(directory)
    note_owner(directory)
    return request, directory


@dataclass(frozen=True, kw_only=True)
class RowLaunch:
    """How one row of a comparison of scripts is started."""

    script: Sequence[str]
    """With its arguments; a whole command where it chooses its strategy itself."""
    world_size: int
    device: str
    launcher: Callable[[Path], Sequence[str]] = lambda _: ()
    """Given the run's folder, the words before the script's; Unsupported: why it is not started."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to its environment."""
    without: tuple[str, ...] = ()
    """Beginnings of the names of variables that are taken from it."""
    base: Record | None = None
    """The first row that trained; None: none has."""

    def environment(self, directory: Path) -> dict[str, str]:
        found = observed_environment(directory)
        return {k: v for k, v in found.items() if not k.startswith(self.without)} | dict(self.variables)


def observe_row(
    row: observed_record.ScriptRow,
    launch: RowLaunch,
    store: Store,
    measure: MeasureSection,
    limits: Limits,
    command: Sequence[str],
) -> Record:
    """Run one row to its end, its output in the launcher's log, and record it; nothing outlives it."""
    request, directory = _begin(launch.script, store, measure, command, row)

    def untrained(status: Status, **why: Any) -> Record:
        return observed_record.record_of_no_training(
            request, launch.world_size, launch.device, launch.base, status, **why
        )

    log = launcher_log(directory)
    with leaving_none_behind(), log.open("ab") as output:
        try:
            process = subprocess.Popen(
                [*launch.launcher(directory), *launch.script], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env=launch.environment(directory),
                preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
            )  # fmt: skip
        except OSError as error:
            said = f"'{error.filename}' cannot be started: {error.strerror}"
            part = ErrorPart(kind=type(error).__name__, message=said)
            return _kept(directory, untrained("failed", error=part))
        except (HarnessError, Unsupported) as error:
            return _kept(directory, untrained("unsupported", reasons=[described(error)]))
        code, told_at, late = _ended_in_time(process, directory, limits, output)
        with suppress(OSError):
            observed_record.note_end(directory, process.pid, code)
        observed_record.wait_for_processes(directory)
    record = observed_record.assemble_observed(directory, request, code, told_at)
    if record is None:
        ended = f"no process of the script trained: {_last_words(read_log(log), code)}"
        kind = "Interrupted" if told_at is not None and late is None else "Exit"
        record = untrained("failed", error=ErrorPart(kind=kind, message=ended, log_tail=log_tail(log)))
    if late is not None and record.status != "ok":
        own = record.error if record.was_interrupted else None
        why = own or ErrorPart(kind="Timeout", message=INTERRUPTED)
        message = why.message.replace(INTERRUPTED, late)
        why = why.model_copy(update={"kind": "Timeout", "message": message, "log_tail": log_tail(log)})
        record = record.model_copy(update={"status": "timeout", "error": why})
    return _kept(directory, observed_record.told_apart(record, row))


RAISED = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*|\S+: error: .*)$", re.MULTILINE)
"""The last line of a traceback, which torchrun's ranks begin with their number, or of a parser of options."""
OF_LAUNCHERS = ("torch.distributed.elastic", "subprocess.CalledProcessError")
"""Errors that say of a script only that it failed."""
LAUNCHERS_LINE = re.compile(r"^(?:[EWI]\d{4} .*|Traceback \([\s\S]*)", re.MULTILINE)
"""A line of torchrun, or the traceback of a launcher, below a script that raised nothing."""
POLL_SECONDS = 0.5
MOST_OUTPUT_BYTES = 2**28
EMPTIED = b"harness: what was printed before this filled 256 MB and is deleted\n"


def _last_words(log: str, code: int) -> str:
    """The last error that a script printed; else the exit code, and the last line if there is one."""
    if raised := [line for line in RAISED.findall(log) if not line.startswith(OF_LAUNCHERS)]:
        return raised[-1]
    lines = LAUNCHERS_LINE.sub("", log).strip().splitlines()
    return f"exit code {code}" + (f"; last printed: {lines[-1]}" if lines else "")


def _kept(directory: Path, record: Record) -> Record:
    kept = keep_record(directory, record)
    forget_owner(directory)
    return kept


def _ended_in_time(
    process: subprocess.Popen[bytes], directory: Path, limits: Limits, output: BinaryIO
) -> tuple[int, float | None, str | None]:
    """The exit code; when it was told to end, by Ctrl-C or since it was late; and why it was late.

    What it prints may fill the disk: all of `output` but its end is deleted now and then.
    """
    began = time.time()
    told_at: float | None = None
    late: str | None = None
    while True:
        try:
            return process.wait(POLL_SECONDS), told_at, late
        except subprocess.TimeoutExpired:
            if os.fstat(output.fileno()).st_size > MOST_OUTPUT_BYTES:
                end = read_log(launcher_log(directory))
                output.truncate(0)
                output.write(EMPTIED + end.encode())
                output.flush()
            if told_at is None and (late := _late(directory, began, limits)) is None:
                continue
        except KeyboardInterrupt:
            late = None
        if told_at is None:
            told_at = time.time()
            process.terminate()
        elif time.time() > told_at + INTERRUPT_SECONDS:
            process.kill()


def _late(directory: Path, began: float, limits: Limits) -> str | None:
    now, quiet = time.time(), limits.phase_timeout_seconds
    if limits.timeout_seconds is not None and now > began + limits.timeout_seconds:
        return f"ended after runtime.timeout_seconds={limits.timeout_seconds:g}"
    newest = max([began, *(path.stat().st_mtime for path in directory.glob("rank-*.jsonl"))])
    return f"no step for runtime.phase_timeout_seconds={quiet:g}" if now > newest + quiet else None


def observed_environment(directory: Path) -> dict[str, str]:
    """The environment of this process, in which every Python process observes itself."""
    environment = given_environment()
    paths = [str(BOOTSTRAP), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return environment | {
        "PYTHONPATH": os.pathsep.join(paths),
        RUN_DIRECTORY: str(directory),
        PACKAGES: str(ROOT),
        PROCESSES: str(observed_record.processes_folder(directory)),
    }


def _followed_to_its_end(process: subprocess.Popen[bytes]) -> tuple[int, int | None, float | None]:
    """The exit code (negative: a signal ended it), the first signal that asked this process to end, and when.

    What asks this process alone to end, or to do what a script does then (SIGUSR1, SIGUSR2), is passed on.
    """
    told: list[tuple[int, float]] = []

    def pass_on(number: int, _: object) -> None:
        if number in ASKS_TO_END:
            told.append((number, time.time()))
        process.send_signal(number)

    def ended(code: int) -> tuple[int, int | None, float | None]:
        return code, *(told[0] if told else (None, None))

    kept = {
        number: signal.signal(number, pass_on) for number in (*ASKS_TO_END, signal.SIGUSR1, signal.SIGUSR2)
    }
    try:
        while True:
            try:
                return ended(process.wait())
            except KeyboardInterrupt:
                told.append((signal.SIGINT, time.time()))
                if _is_in_foreground():
                    continue  # Ctrl-C reaches every process of the terminal's foreground, the command too
            with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                return ended(process.wait(INTERRUPT_SECONDS))
            process.send_signal(signal.SIGINT)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether this process has a terminal whose keys send it signals."""
    with suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False
