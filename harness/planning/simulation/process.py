"""Runs simulations in a process of their own, which loads the training libraries."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.errors import HarnessError
from harness.import_path import module_command, safe_environment
from harness.launch.libraries import require_libraries
from harness.run_directory.simulation import SimulatedRank, SimulationRequest, read_result, write_requests
from harness.scratch import scratch_folder

SIMULATOR = "harness.worker.simulation"
LOOKING_SECONDS = 0.1


def run_simulations(requests: Sequence[SimulationRequest]) -> Iterator[SimulatedRank]:
    """Answers in order, each as soon as it is there.

    Raises HarnessError if the job itself is refused, or the process ends without answers.
    """
    require_libraries("simulations")
    with scratch_folder("simulate") as folder:
        directory = Path(folder)
        write_requests(directory, list(requests))
        log = directory / "simulation.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*module_command(SIMULATOR), str(directory)],
                env=safe_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # with the forks that simulate, which must end with it
            )
        try:
            for index in range(len(requests)):
                result = _wait(process, directory, index)
                if result is None:
                    raise HarnessError(f"the simulation broke off: {_last_line(log)}")
                if result.status == "refused":
                    raise HarnessError(result.reason or "the job is refused")
                yield result
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _wait(process: subprocess.Popen[bytes], directory: Path, index: int) -> SimulatedRank | None:
    """The answer to a request; None if the process ended without it."""
    while process.poll() is None:
        if (result := read_result(directory, index)) is not None:
            return result
        time.sleep(LOOKING_SECONDS)
    return read_result(directory, index)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
