"""`python -m tests.fuzz`: counts how inputs end; exits with 1 if one is neither read nor refused."""

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings

from harness.imported.reading import library_defaults
from harness.safe_text import harmless
from tests.fuzz.guard import Guard
from tests.fuzz.surfaces import SURFACES

MEMORY_BYTES = 4 * 2**30
"""Private memory of the process: what takes more fails with MemoryError."""
BAD = ("traceback", "hang", "outside", "not one line")
Failure = tuple[str, str, str]
"""Verdict, reason, input."""


def fuzz(name: str, inputs: int, number: int, guard: Guard) -> tuple[Counter[str], list[Failure]]:
    """How `inputs` inputs of a surface end, drawn from the seed `number`; the bad ones."""
    surface = SURFACES[name]
    ends: Counter[str] = Counter()
    bad: list[Failure] = []

    @seed(number)
    @hypothesis_settings(
        max_examples=inputs, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(surface.inputs())
    def one(drawn: Any) -> None:
        verdict, reason = guard.judge(lambda: surface.read(drawn))
        ends[verdict] += 1
        if verdict in BAD:
            bad.append((verdict, reason, repr(drawn)))

    one()
    return ends, bad


@contextmanager
def sandbox() -> Iterator[Path]:
    """A new working directory with what hostile paths name: a pipe, a device, a huge sparse file, a loop."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        os.chdir(name)
        os.mkfifo("fifo")
        Path("zero").symlink_to("/dev/zero")
        Path("loop").symlink_to("loop")
        with Path("sparse").open("wb") as file:
            file.truncate(2**40)
        for variable in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
            os.environ[variable] = name
        tempfile.tempdir = name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = None
            os.chdir(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", choices=SURFACES, help="one surface")
    parser.add_argument("--failures", type=Path, help="write bad inputs here, one JSON document a line")
    given_options = parser.parse_args()
    failures = given_options.failures.absolute() if given_options.failures else None
    number = random.SystemRandom().randrange(2**32) if given_options.seed is None else given_options.seed
    say(f"seed {number}")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    total: Counter[str] = Counter()
    all_bad: list[Failure] = []
    with sandbox() as folder:
        for kind in ("accelerate", "deepspeed"):  # asked in a process, which the guard forbids
            library_defaults(kind)
        guard = Guard(folder)
        for name in [given_options.only] if given_options.only else SURFACES:
            share = 1.0 if given_options.only else SURFACES[name].share
            began = time.monotonic()
            ends, bad = fuzz(name, max(1, round(given_options.inputs * share)), number, guard)
            seconds = time.monotonic() - began
            total += ends
            all_bad += bad
            say(f"{name}: {sum(ends.values())} in {seconds:.0f} s, {_counts(ends)}")
    for verdict, reason, drawn in all_bad[:20]:
        say(f"\n{verdict}: {drawn[:1000]}\n{reason}")
    if failures is not None:
        failures.write_text("".join(json.dumps(failure) + "\n" for failure in all_bad), encoding="utf-8")
    say(f"{sum(total.values())} inputs, seed {number}: {_counts(total)}")
    return 1 if all_bad else 0


def say(text: str) -> None:
    sys.stdout.write(harmless(text) + "\n")
    sys.stdout.flush()


def _counts(ends: Counter[str]) -> str:
    order = ("result", "refused", *BAD)
    return ", ".join(f"{ends[verdict]} {verdict}" for verdict in order if ends[verdict] or verdict in BAD)


if __name__ == "__main__":
    sys.exit(main())
