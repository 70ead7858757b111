"""Measures how sharp the ratios of speeds are: cells in turns over cells that run whole, in the same rounds.

Records are kept in FOLDER, where `--rounds 0` judges them again.

Usage: python -m benchmarks.turns FOLDER [--rounds 7] [--turns 1] [--backends ddp,fsdp] [--set KEY=VALUE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import measuring
from harness.judge.comparison import Comparison
from harness.judge.statistics import Ranking, shared_logs
from harness.record.store import read_runs
from harness.tell.tables import ratio_text

WALL = "seconds.txt"
"""Of the rounds of a side, a line each."""


def main() -> int:
    parser = measuring.options(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="where records are kept")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to add to each side (default: 7)")
    parser.add_argument("--turns", type=int, default=1, help="timed steps of a turn (default: 1)")
    parser.add_argument("--backends", help="default: those of the default comparison")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    words = [word for setting in options.settings for word in ("--set", setting)]
    words += ["--backends", options.backends] if options.backends else []
    sides = {"whole": "null", "turns": str(options.turns)}
    measure(options.folder, sides, options.rounds, words)
    return measuring.present(judge(options.folder), as_json=options.json)


def measure(folder: Path, sides: dict[str, str], rounds: int, words: Sequence[str]) -> None:
    """Add rounds, in each of which every side runs once; which is first alternates."""
    for number in range(rounds):
        for side in sorted(sides, reverse=number % 2 == 1):
            of_side = folder / side
            of_side.mkdir(parents=True, exist_ok=True)
            done = len(_seconds(of_side))
            seconds, _ = measuring.run_quietly([
                *measuring.harness_command(), "compare", "--runs", str(of_side), "--repeats", str(done + 1),
                *words, "--set", f"compare.turns={sides[side]}",
            ])  # fmt: skip
            with (of_side / WALL).open("a") as file:
                file.write(f"{seconds:.2f}\n")
            measuring.progress(f"round {number + 1} of {rounds}, {side}: {seconds:.1f} s")


def judge(folder: Path) -> list[measuring.Result]:
    """Of each cell the spread of its ratio to the base, in turns over whole; and the wall time of rounds."""
    orders = {side: order_of(folder / side) for side in ("whole", "turns")}
    found = []
    for name in orders["whole"].to_base:
        spreads = {
            side: statistics.stdev(shared_logs(order.values[name], order.values[order.base]).values())
            for side, order in orders.items()
        }
        told = (
            f"{side} {ratio_text(order.to_base[name])}, {order.to_base[name].order}, {spreads[side]:.3f}"
            for side, order in orders.items()
        )
        found.append(_result(name, [spreads["turns"] / spreads["whole"]], 1.0, "; ".join(told)))
    wall = {side: _seconds(folder / side) for side in orders}
    ratios = [turns / whole for whole, turns in zip(wall["whole"], wall["turns"], strict=True)]
    told = f"{statistics.median(wall['turns']):.1f} s over {statistics.median(wall['whole']):.1f} s"
    middle = statistics.median(result.ratio for result in found)
    return [
        *found,
        _result("spread, the median cell", [middle], 1.0, f"{len(ratios)} rounds"),
        _result("wall time of a round", ratios, 1.0, told),
    ]


def order_of(folder: Path) -> Ranking:
    """Of the cells of a folder, which has one place."""
    (order,) = (
        order
        for order in Comparison(record for _, record in read_runs([folder])[0]).comparable.rankings.values()
        if len(order.names) > 1
    )
    return order


def _seconds(folder: Path) -> list[float]:
    path = folder / WALL
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def _result(name: str, ratios: Sequence[float], target: float, detail: str) -> measuring.Result:
    return measuring.Result(
        name=name, ratio=statistics.median(ratios), lowest=min(ratios), highest=max(ratios), target=target,
        detail=detail,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
