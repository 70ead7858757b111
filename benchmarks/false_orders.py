"""Counts orders that are wrong, and those that are found, when few rounds are drawn from many measured ones.

One backend runs under two names, so an order of the two is a false one. Of other cells all rounds together
tell the truth: those that truly differ by so much from the base should be settled by a draw, and rightly.
Records are kept: a call with the same folder continues where the last one ended, and `--minutes 0` judges
the kept records again.

Usage: python -m benchmarks.false_orders FOLDER [--measured 60] [--minutes 120] [--backends zero0,zero2,fsdp1]
       python -m benchmarks.false_orders NOISY_FOLDER --minutes 0 --truth QUIET_FOLDER
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from benchmarks.measuring import harness_command, progress, run_quietly
from harness.judge.comparison import Comparison
from harness.judge.facts import OWN_STEP, SPEED
from harness.judge.rows import BASE, rank_speeds
from harness.judge.statistics import Ranking, Round, Timed
from harness.record.store import read_runs
from harness.tell.formats import percent

TWIN = f"{BASE}:preset=like-for-like"
"""The base under another name: its preset is that of the experiment."""
MOST_FALSE = 0.05
CLOCKS = {SPEED: "wall time", OWN_STEP: "without others"}
SEED = 20260101
CHUNK = 7
"""Rounds that one call of `harness compare` adds."""
CONFIGURATION = Path(__file__).parents[1] / "configs" / "default.yaml"


@dataclass(frozen=True, kw_only=True)
class Share:
    """How many draws, or pairs of all draws, do what a row of the table says."""

    what: str
    clock: str
    count: int
    of: int

    @property
    def value(self) -> float:
        return self.count / self.of if self.of else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where records are kept")
    parser.add_argument("--measured", type=int, default=60, help="rounds to measure (default: 60)")
    parser.add_argument(
        "--minutes", type=float, default=120, help="measure none after so many (default: 120)"
    )
    parser.add_argument("--backends", default="", help="cells that run beside the two, for the power")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of a draw (default: 7)")
    parser.add_argument("--draws", type=int, default=200, help="default: 200")
    parser.add_argument("--differ", type=float, default=0.1, help="least true difference (default: 0.1)")
    parser.add_argument("--truth", type=Path, help="a folder whose rounds tell the truth (default: FOLDER)")
    options = parser.parse_args()
    others = [name for name in options.backends.split(",") if name]
    measure(options.folder, [BASE, TWIN, *others], options.measured, options.minutes)
    shares = judge(
        options.folder, options.truth or options.folder, options.rounds, options.draws, options.differ
    )
    print(table(shares))
    wrong = [share for share in shares if share.what.startswith("false") and share.value > MOST_FALSE]
    return 1 if wrong else 0


def measure(folder: Path, backends: Sequence[str], rounds: int, minutes: float) -> None:
    """Run the rounds that are missing, a few at a time."""
    end = time.monotonic() + 60 * minutes
    known = (
        max((1 + record.repeat for _, record in read_runs([folder])[0]), default=0) if folder.exists() else 0
    )
    while known < rounds and time.monotonic() < end:
        known = min(known + CHUNK, rounds)
        seconds, _ = run_quietly([
            *harness_command(), "compare", "--config", str(CONFIGURATION), "--runs", str(folder),
            "--backends", ",".join(backends), "--repeats", str(known), "--set", "compare.noise_runs=false",
        ])  # fmt: skip
        progress(f"{known} of {rounds} rounds: {seconds:.0f} s")


def judge(folder: Path, truth: Path, rounds: int, draws: int, differ: float) -> list[Share]:
    """Each share by each clock. Exits where too few rounds were measured."""
    found = []
    for clock, name in CLOCKS.items():
        measured, true = (_measured(place, clock) for place in (folder, truth))
        if measured is None or true is None:
            continue
        numbers = sorted(set.intersection(*map(set, measured.values.values())))
        if len(numbers) < rounds:
            raise SystemExit(f"{len(numbers)} rounds hold a run of every cell; draw fewer, or measure more")
        chance = random.Random(SEED)
        drawn = [chance.sample(numbers, rounds) for _ in range(draws)]
        found += _shares(measured, true, drawn, differ, name)
    return found


def _measured(folder: Path, clock: str) -> Ranking | None:
    """All rounds of a folder by one clock; None where it was not recorded."""
    groups = Comparison(record for _, record in read_runs([folder])[0]).comparable.groups
    timed = [g for g in groups if g.world_size > 1 and g.succeeded and g.values(clock)]
    return rank_speeds(timed, clock) if timed else None


def _shares(
    measured: Ranking, true: Ranking, drawn: Sequence[Sequence[tuple[int, ...]]], differ: float, clock: str
) -> list[Share]:
    alone, together, settled, wrong, pairs = 0, 0, 0, 0, 0
    apart = {
        name: ratio.middle
        for name, ratio in true.to_base.items()
        if name != TWIN and name in measured.values and ratio.middle and abs(ratio.middle - 1) >= differ
    }
    for numbers in drawn:
        values = {name: _part(of, numbers) for name, of in measured.values.items()}
        if TWIN in values:
            pair = replace(measured, values={name: values[name] for name in (measured.base, TWIN)})
            alone += pair.to_base[TWIN].order in ("faster", "slower")
            together += replace(measured, values=values).to_base[TWIN].order in ("faster", "slower")
        orders = replace(measured, values=values).to_base
        for name, middle in apart.items():
            right = "faster" if middle > 1 else "slower"
            pairs += 1
            settled += orders[name].order == right
            wrong += orders[name].order not in (right, "open")
    found = []
    if TWIN in measured.values:
        found.append(Share(what="false orders, the two alone", clock=clock, count=alone, of=len(drawn)))
        if len(measured.values) > 2:
            found.append(Share(what="false orders, among all", clock=clock, count=together, of=len(drawn)))
    if apart:
        by = f"pairs that differ by {percent(differ)} or more"
        found.append(Share(what=f"settled: {by}", clock=clock, count=settled, of=pairs))
        found.append(Share(what=f"false answers: {by}", clock=clock, count=wrong, of=pairs))
    return found


def _part(values: Mapping[Round, Timed], numbers: Sequence[Round]) -> dict[Round, Timed]:
    return {number: values[number] for number in numbers}


def table(shares: Sequence[Share]) -> str:
    """A row for each share and clock."""
    rows = [[s.what, s.clock, f"{s.count} of {s.of}", percent(s.value)] for s in shares]
    return tabulate(rows, headers=["", "clock", "draws", "share"], tablefmt="github")


if __name__ == "__main__":
    sys.exit(main())
