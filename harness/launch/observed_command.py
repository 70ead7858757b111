"""Runs a command whose Python processes measure themselves, and writes the record of what they did."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.import_path import given_environment
from harness.job.experiment import MeasureSection
from harness.launch.bootstrap.sitecustomize import PACKAGES, PROCESSES, RUN_DIRECTORY
from harness.record import Record
from harness.record.store import Store, as_name, keep_record
from harness.run_directory.observed_record import (
    ObserveRequest,
    assemble_observed,
    note_end,
    processes_folder,
    wait_for_processes,
)
from harness.safe_text import described, redacted

BOOTSTRAP = Path(__file__).parent / "bootstrap"
ROOT = Path(__file__).resolve().parents[2]


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
) -> Observed:
    """Run `observed` to its end and record it.

    Standard streams, the working directory and the environment are the command's own; Ctrl-C reaches it from
    the terminal. `keeps_output_free`: its standard output goes to standard error. Raises HarnessError if it
    cannot be started.
    """
    now = datetime.now(UTC)
    name = as_name(redacted(Path(observed[0]).name))
    request = ObserveRequest(
        run_id=f"{now.strftime('%Y%m%d-%H%M%S')}-observed-{name}-{secrets.token_hex(3)}",
        created_at=now.isoformat(timespec="milliseconds"),
        command=list(command),
        observed=list(observed),
        files={word: digest for word in observed if (digest := _digest(Path(word))) is not None},
        measure=measure,
    )
    directory = store.run_directory(request.run_id).resolve()
    request.write(directory)
    try:
        output = sys.stderr.fileno() if keeps_output_free else None
        process = subprocess.Popen(observed, env=observed_environment(directory), stdout=output)
    except OSError as error:
        directory.joinpath("observe.json").unlink()
        directory.rmdir()
        raise HarnessError(f"'{redacted(observed[0])}' cannot be started: {error.strerror}") from error
    code, told, told_at = _followed_to_its_end(process)
    with suppress(OSError):
        note_end(directory, process.pid, code)
    exit_code = code if code >= 0 else 128 - code
    # Launchers end with 1, or by another signal, where their ranks were told to end.
    if told is not None and (code < 0 or code == 1):
        exit_code = 128 + told
    try:
        wait_for_processes(directory)
        record = assemble_observed(directory, request, code, told_at)
        if record is None:
            store.discard(request.run_id)
        else:
            record = keep_record(directory, record)
    except (OSError, ValueError, HarnessError) as error:  # the command has ended: its exit code counts
        return Observed(record=None, exit_code=exit_code, problem=described(error))
    return Observed(record=record, exit_code=exit_code)


def _digest(path: Path) -> str | None:
    """Of a file's contents; None: it is none, cannot be read, or is too large for a script."""
    with suppress(OSError, ValueError):
        if path.is_file() and path.stat().st_size <= MOST_DOCUMENT_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def observed_environment(directory: Path) -> dict[str, str]:
    """The environment of this process, in which every Python process observes itself."""
    environment = given_environment()
    paths = [str(BOOTSTRAP), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return environment | {
        "PYTHONPATH": os.pathsep.join(paths),
        RUN_DIRECTORY: str(directory),
        PACKAGES: str(ROOT),
        PROCESSES: str(processes_folder(directory)),
    }


def _followed_to_its_end(process: subprocess.Popen[bytes]) -> tuple[int, int | None, float | None]:
    """The exit code (negative: a signal ended it), the first signal that asked this process to end, and when.

    What asks this process alone to end is passed on.
    """
    told: list[tuple[int, float]] = []

    def pass_on(number: int, _: object) -> None:
        told.append((number, time.time()))
        process.send_signal(number)

    def ended(code: int) -> tuple[int, int | None, float | None]:
        return code, *(told[0] if told else (None, None))

    kept = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP)}
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
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
