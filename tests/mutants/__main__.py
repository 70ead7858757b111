"""Plants one fault after the other in a copy of this tree and runs the tests that must notice it.

Exits 1 if a fault goes unnoticed, or if tests cannot tell: they fail without one, or cannot begin with it.

Usage: python -m tests.mutants [-k NAME ...] [--jobs N] [--list | --check]
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from queue import Queue

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.table import MUTANTS

SECONDS_AT_MOST = 1800.0
"""For the tests of one fault, or all without one. A test that waits for ever has noticed its fault."""
VENV = ".venv"
OUTCOMES = {0: "SURVIVED", 1: "killed", -signal.SIGKILL: "killed (hung)"}
"""By the exit status of pytest; any other says that tests did not run."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", "--only", nargs="+", default=[""], help="parts of names or places")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy of its own")
    parser.add_argument("--list", action="store_true", help="print what is guaranteed; plant nothing")
    parser.add_argument("--check", action="store_true", help="say which faults fit the source no more")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if any(part in f"{m.name} {m.place}" for part in options.only)]
    if options.list:
        say("\n".join(guarantees(chosen)))
        return 0
    stale = [reason for m in chosen if (reason := m.stale()) is not None]
    say("\n".join((*stale, f"{len(chosen)} faults, {len(stale)} fit the source no more\n")))
    if options.check:
        return 1 if stale else 0
    chosen = [mutant for mutant in chosen if mutant.stale() is None]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: Queue[Path] = Queue()
        for index in range(options.jobs):
            copies.put(copied(Path(folder, str(index))))
        if (reason := why_not(copies.queue[0], chosen)) is not None:
            say(reason)
            return 1

        def attempt(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                outcome, seconds = planted(copy, mutant)
            finally:
                copies.put(copy)
            say(f"| {mutant.guarantee} | {mutant.tests} | {outcome} | {seconds:.1f} |")
            return outcome.startswith("killed")

        say("| guarantee | test | fault | seconds |\n| --- | --- | --- | --- |")
        with ThreadPoolExecutor(options.jobs) as pool:
            noticed = list(pool.map(attempt, chosen))
    say(f"\n{len(noticed)} faults, {noticed.count(True)} noticed")
    return 0 if all(noticed) and not stale else 1


def guarantees(mutants: Iterable[Mutant]) -> Iterator[str]:
    """A table in Markdown: what is guaranteed of each subsystem, the fault that breaks it, who notices."""
    yield "| subsystem | guarantee | fault | test |\n| --- | --- | --- | --- |"
    for mutant in sorted(mutants, key=lambda mutant: mutant.subsystem):
        fault = f"{mutant.name} in {mutant.place} of {mutant.file}"
        yield f"| {mutant.subsystem} | {mutant.guarantee} | {fault} | {mutant.tests} |"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def copied(copy: Path) -> Path:
    """The files that git knows or would add, as they are here, and an interpreter that imports them.

    It has the packages of this one but for the installed harness, whatever environment a test gives it.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    purelib = Path(sysconfig.get_path("purelib"))
    packages = copy / VENV / purelib.relative_to(sys.prefix)
    packages.mkdir(parents=True)
    # A folder that is added so has its own .pth files left unread, that of the installed harness too.
    (packages / "copy.pth").write_text(f"{copy}\n{purelib}\n", encoding="utf-8")
    python = interpreter(copy)
    python.parent.mkdir()
    python.symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    (copy / VENV / "pyvenv.cfg").write_text(f"home = {Path(python.readlink()).parent}\n", encoding="utf-8")
    return copy


def interpreter(copy: Path) -> Path:
    return copy / VENV / "bin" / "python"


def why_not(copy: Path, mutants: Iterable[Mutant]) -> str | None:
    """Why no fault can be judged; None: the copy is what processes import, and its tests pass."""
    command = [interpreter(copy), "-P", "-c", "import harness; print(harness.__file__)"]
    found = subprocess.run(
        command, cwd="/", env={}, check=True, capture_output=True, text=True
    ).stdout.strip()
    if Path(found) != copy / "harness" / "__init__.py":
        return f"processes of the copy import {found}"
    status, said = run_tests(copy, sorted({test for mutant in mutants for test in mutant.nodes}))
    return f"{said}\ntests fail without a fault (pytest exits with {status})" if status else None


def planted(copy: Path, mutant: Mutant) -> tuple[str, float]:
    """How the tests ended with this fault in the copy, and after how many seconds."""
    path = copy / mutant.file
    given = path.read_text(encoding="utf-8")
    began = time.monotonic()
    try:
        write(path, mutant.applied(given))
        status, _ = run_tests(copy, mutant.nodes)
    finally:
        write(path, given)
    return OUTCOMES.get(status, f"BROKEN: pytest exits with {status}"), time.monotonic() - began


def write(path: Path, text: str) -> None:
    """Also drop the compiled module: it is told from an older one by whole seconds and its size."""
    path.write_text(text, encoding="utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(copy: Path, nodes: Sequence[str]) -> tuple[int, str]:
    """The exit status of pytest, that of a kill if it took too long, and what it printed."""
    command = [interpreter(copy), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=short", *nodes]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment(copy), stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(SECONDS_AT_MOST)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:  # whatever the tests left, and all of them on Ctrl-C
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def environment(copy: Path) -> dict[str, str]:
    """In which Python looks into the copy first."""
    return os.environ | {"PYTHONPATH": str(copy)}


if __name__ == "__main__":
    sys.exit(main())
