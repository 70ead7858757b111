"""`python -m tests.survival KIND`: how comparisons end that are killed, share a folder, or fill a disk.

KIND is kills, pairs or disk. Exits with 1 if one ended otherwise than it must.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.survival.comparisons import Ended, end, faults_of_folder, start, table_faults
from tests.survival.full_disk import disk_faults

TRIALS = {"kills": 20, "pairs": 10, "disk": 10}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=TRIALS)
    parser.add_argument("--trials", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="survival-") as name:
        began = time.monotonic()
        undisturbed = end(start(Path(name) / "undisturbed"))
        seconds = time.monotonic() - began
        say(f"undisturbed: exit {undisturbed.code}, {len(undisturbed.table)} rows in {seconds:.0f} s")
        for number in range(given.trials or TRIALS[given.kind]):
            folder = Path(name) / str(number)
            if given.kind == "kills":
                moment = chance.uniform(0.02, 0.98) * seconds
                what, faults = f"killed after {moment:.1f} s", faults_of_kill(folder, moment, undisturbed)
            elif given.kind == "pairs":
                delay = chance.uniform(0, 0.5) * seconds
                what, faults = f"second after {delay:.1f} s", faults_of_pair(folder, delay, undisturbed)
            else:
                moment = chance.uniform(0.05, 0.95) * seconds
                what, faults = disk_faults(folder, moment, undisturbed)
            bad += bool(faults)
            say(f"{number + 1}: {what}: {'; '.join(faults) or 'as it must'}")
    say(f"{given.kind}: seed {given.seed}, {bad} ended otherwise than they must")
    return 1 if bad or undisturbed.code else 0


def faults_of_kill(runs: Path, moment: float, undisturbed: Ended) -> list[str]:
    """What goes wrong when a comparison is killed after so many seconds, and called again."""
    process = start(runs)
    try:
        process.wait(timeout=moment)
    except Exception:
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
    else:
        started = []
    end(process)
    faults = _differences(end(start(runs)), undisturbed)
    psutil.wait_procs(started, timeout=10)
    faults += [f"process {child.pid} was left" for child in started if child.is_running()]
    return faults + faults_of_folder(runs)


def faults_of_pair(runs: Path, delay: float, undisturbed: Ended) -> list[str]:
    """What goes wrong when a second comparison of the same cells begins after so many seconds."""
    first = start(runs)
    time.sleep(delay)
    second = start(runs)
    faults = [fault for process in (first, second) for fault in _differences(end(process), undisturbed)]
    return faults + faults_of_folder(runs)


def _differences(ended: Ended, undisturbed: Ended) -> list[str]:
    faults = [f"exit {ended.code}: {ended.lines[-1:]}"] if ended.code else []
    faults += ["a traceback"] if ended.has_traceback else []
    return faults + table_faults(ended, undisturbed)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
