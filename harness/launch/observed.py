"""Runs a command whose Python processes measure themselves, and writes the record of what they did."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import HarnessError
from harness.import_path import given_environment
from harness.launch.bootstrap.sitecustomize import PACKAGES, RUN_DIRECTORY
from harness.record import Record
from harness.record.run_id import as_name
from harness.run_directory.observed import ObserveRequest, assemble_observed
from harness.spec import MeasureSection
from harness.store import Store, keep_record

BOOTSTRAP = Path(__file__).parent / "bootstrap"
ROOT = Path(__file__).resolve().parents[2]


def observe_command(
    observed: Sequence[str],
    store: Store,
    measure: MeasureSection,
    *,
    command: Sequence[str],
    keeps_output_free: bool,
) -> tuple[Record | None, int]:
    """Run `observed` to its end; return its record, None if no process of it trained, and its exit code.

    Standard streams, the working directory and the environment are the command's own; Ctrl-C reaches it from
    the terminal. `keeps_output_free`: its standard output goes to standard error. Raises HarnessError if it
    cannot be started.
    """
    now = datetime.now(UTC)
    name = as_name(Path(observed[0]).name)
    request = ObserveRequest(
        run_id=f"{now.strftime('%Y%m%d-%H%M%S')}-observed-{name}-{secrets.token_hex(3)}",
        created_at=now.isoformat(timespec="milliseconds"),
        command=list(command),
        observed=list(observed),
        measure=measure,
    )
    directory = store.run_directory(request.run_id).resolve()
    request.write(directory)
    code = _run(observed, directory, sys.stderr.fileno() if keeps_output_free else None)
    record = assemble_observed(directory, request, code)
    if record is None:
        store.discard(request.run_id)
    else:
        record = keep_record(directory, record)
    return record, code


def observed_environment(directory: Path) -> dict[str, str]:
    """The environment of this process, in which every Python process observes itself."""
    environment = given_environment()
    paths = [str(BOOTSTRAP), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return environment | {
        "PYTHONPATH": os.pathsep.join(paths),
        RUN_DIRECTORY: str(directory),
        PACKAGES: str(ROOT),
    }


def _run(observed: Sequence[str], directory: Path, output: int | None) -> int:
    try:
        process = subprocess.Popen(observed, env=observed_environment(directory), stdout=output)
    except OSError as error:
        directory.joinpath("observe.json").unlink()
        directory.rmdir()
        raise HarnessError(f"'{observed[0]}' cannot be started: {error.strerror}") from error
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # Ctrl-C has reached the command too; what asked this process alone to end is passed on.
            process.send_signal(signal.SIGTERM)
