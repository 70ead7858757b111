"""Counts what a sound comparison is accused of, on an idle machine and beside a program that takes a core.

Nothing is wrong with the default comparison, so a finding about time that it raises is a false alarm;
`busy-machine` is right beside the program. Records are kept: a call with the same folder continues where the
last one ended, and `--minutes 0` judges the kept records again, after a rule has changed.

`--asleep 0.005` adds two cells of DDP whose rank 1 sleeps so long in each forward or backward pass:
`slow-rank` must name both, which takes three traced steps or more.

Usage: python -m benchmarks.false_alarms FOLDER [--comparisons 20] [--minutes 90] [--backends ddp,zero2]
           [--set measure.traced_steps=6] [--asleep 0.005]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.measuring import harness_command, progress, run_quietly
from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.record.store import read_runs
from tests.traps.adapters import SLEEP_SECONDS
from tests.traps.matrix import install

IDLE, LOADED = "idle", "loaded"
SITUATIONS = (IDLE, LOADED)
UNFINISHED = ".unfinished"
BUSY = "busy-machine"
OF_TIME = frozenset(
    {"slow-rank", "slow-data", "faster-than-possible", "inconsistent-timing", "cores-shared", "numa-unbound",
     "warmup-too-short", BUSY}
)  # fmt: skip
ASLEEP = ("planted-SleepsInForward", "planted-SleepsInBackward")
CONFIGURATION = Path(__file__).parents[1] / "configs" / "default.yaml"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What one comparison was accused of."""

    situation: str
    number: int
    runs: int
    other_cores: tuple[float, ...]
    """Of each run what other work used of the processors."""
    runs_of: Counter[str]
    """By id, of how many runs or cells it was found; cells whose rank sleeps are left out."""
    asleep: dict[str, bool]
    """By label of such a cell, whether its rank was named."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where records are kept")
    parser.add_argument("--comparisons", type=int, default=20, help="of each situation (default: 20)")
    parser.add_argument("--minutes", type=float, default=90, help="start none after so many (default: 90)")
    parser.add_argument("--situations", nargs="+", choices=SITUATIONS, default=SITUATIONS)
    parser.add_argument("--backends", help="of each comparison (default: those of the default comparison)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of each comparison")
    parser.add_argument("--asleep", type=float, metavar="SECONDS", help="add cells whose rank 1 sleeps")
    options = parser.parse_args()
    backends = [options.backends] if options.backends else []
    if options.asleep:
        backends = [*(backends or load_experiment(CONFIGURATION, []).compare.backends), *ASLEEP]
        install(options.folder / "site")
        root = Path(__file__).parents[1]
        os.environ["PYTHONPATH"] = f"{options.folder / 'site'}{os.pathsep}{root}"
        os.environ[SLEEP_SECONDS] = str(options.asleep)
    arguments = ["--backends", ",".join(backends)] if backends else []
    arguments += [word for setting in options.set for word in ("--set", setting)]
    collect(options.folder, options.situations, options.comparisons, options.minutes, arguments)
    judged = judge_all(options.folder)
    print(table(judged))
    alarms = false_alarms(judged)
    print("\n".join(["", *alarms]) if alarms else "\nno false alarm")
    return 1 if alarms else 0


def collect(
    folder: Path, situations: Sequence[str], comparisons: int, minutes: float, arguments: Sequence[str] = ()
) -> None:
    """Run the comparisons that are missing, situations in turns, so that both meet the same machine."""
    end = time.monotonic() + 60 * minutes
    for number in range(comparisons):
        for situation in situations:
            place = folder / situation / f"{number:02d}"
            if place.exists():
                continue
            if time.monotonic() >= end:
                return
            progress(
                f"{situation} {number + 1}/{comparisons}: {run_comparison(place, situation, arguments):.0f} s"
            )


def run_comparison(place: Path, situation: str, arguments: Sequence[str] = ()) -> float:
    """The default comparison with its records at `place`; its wall seconds. Exits if it fails."""
    unfinished = place.with_suffix(UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [*harness_command(), "compare", "--config", str(CONFIGURATION), "--runs", str(unfinished)]
    command += arguments
    if situation == IDLE:
        seconds, _ = run_quietly(command)
    else:
        with taken_core():
            seconds, _ = run_quietly(command)
    unfinished.rename(place)
    return seconds


@contextmanager
def taken_core() -> Iterator[None]:
    """A program of its own that computes all the time."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def judge_all(folder: Path) -> list[Judged]:
    """Every comparison that is kept, by situation and number."""
    return [
        judge(place, situation)
        for situation in SITUATIONS
        for place in sorted((folder / situation).glob("*"))
        if place.suffix != UNFINISHED
    ]


def judge(place: Path, situation: str) -> Judged:
    """The findings of one comparison by the rules of today."""
    comparison = Comparison([record for _, record in read_runs([place])[0]])
    used = [row.run.disturbance for row in comparison.rows]
    named = {label for f in comparison.findings if f.id == "slow-rank" for label in f.backends}
    labels = {row.label for row in comparison.rows}
    return Judged(
        situation=situation,
        number=int(place.name),
        runs=len(comparison.rows),
        other_cores=tuple(one.other_cores for one in used if one is not None),
        runs_of=Counter(f.id for f in comparison.findings if not set(f.backends) & set(ASLEEP)),
        asleep={label: label in named for label in ASLEEP if label in labels},
    )


def false_alarms(judged: Sequence[Judged]) -> list[str]:
    """One line for each finding about time that should not be, or is missing."""
    alarms = []
    for one in judged:
        name = f"{one.situation} {one.number:02d}"
        alarms += [
            f"{name}: {kind} ({count})"
            for kind, count in one.runs_of.items()
            if kind in OF_TIME - {BUSY} or (kind == BUSY and one.situation == IDLE)
        ]
        alarms += [f"{name}: no slow-rank of {label}" for label, named in one.asleep.items() if not named]
        if one.situation == LOADED and not one.runs_of[BUSY]:
            alarms.append(f"{name}: no {BUSY}")
    return alarms


def table(judged: Sequence[Judged]) -> str:
    """A row for each situation, and how many comparisons and runs have each finding."""
    kinds = sorted({kind for one in judged for kind in one.runs_of} | {BUSY, "slow-rank", "warmup-too-short"})
    rows = []
    for situation in SITUATIONS:
        own = [one for one in judged if one.situation == situation]
        if not own:
            continue
        cores = sorted(used for one in own for used in one.other_cores)
        asleep = [named for one in own for named in one.asleep.values()]
        found = [(sum(kind in one.runs_of for one in own), _total(kind, own)) for kind in kinds]
        rows.append(
            [
                situation,
                len(own),
                sum(one.runs for one in own),
                f"{cores[0]:.2f} to {cores[-1]:.2f}" if cores else "n/a",
                *(f"{comparisons} ({runs})" for comparisons, runs in found),
                f"{sum(asleep)} of {len(asleep)}",
            ]
        )
    headers = ["situation", "comparisons", "runs", "cores used by others", *kinds, "sleeping ranks named"]
    note = "Of each finding: comparisons, and in brackets runs or cells."
    return tabulate(rows, headers=headers, tablefmt="github") + f"\n\n{note}"


def _total(kind: str, judged: Sequence[Judged]) -> int:
    return sum(one.runs_of[kind] for one in judged)


if __name__ == "__main__":
    sys.exit(main())
