"""Measures how far ratios of speeds vary between rounds: cells in turns over cells that run whole."""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from pathlib import Path

import measuring

from harness.judge.measures import step_seconds
from harness.record.store import Store

BASE = "ddp"
OTHERS = ("zero2", "fsdp")
SETTINGS = {"whole": "compare.turns=null", "turns": "compare.turns=3"}


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="each runs all cells whole and in turns")
    options = parser.parse_args()
    return measuring.present(measure(options.rounds), as_json=options.json)


def measure(rounds: int) -> list[measuring.Result]:
    """Of each backend the spread of its ratio to the base, and the wall time of a comparison."""
    ratios: dict[str, dict[str, list[float]]] = {side: {name: [] for name in OTHERS} for side in SETTINGS}
    seconds: dict[str, list[float]] = {side: [] for side in SETTINGS}
    for number in range(rounds):
        for side in sorted(SETTINGS, reverse=number % 2 == 1):
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                seconds[side].append(one_round(Path(folder), SETTINGS[side]))
                steps = mean_steps(Path(folder))
            for name in OTHERS:
                ratios[side][name].append(math.log(steps[name] / steps[BASE]))
            told = ", ".join(f"{name} {math.exp(ratios[side][name][-1]):.3f}" for name in OTHERS)
            measuring.progress(f"round {number + 1}, {side}: {seconds[side][-1]:.1f} s; over {BASE}: {told}")
    return [*(_spread(name, ratios) for name in OTHERS), _wall(seconds)]


def one_round(folder: Path, setting: str) -> float:
    """Seconds of one comparison."""
    command = [*measuring.harness_command(), "compare", "--fresh", "--strict", "--runs", str(folder)]
    command += ["--backends", ",".join((BASE, *OTHERS)), "--nproc", str(measuring.RANKS)]
    for assignment in ("runtime.device=cpu", "compare.noise_runs=false", setting):
        command += ["--set", assignment]
    return measuring.run_quietly(command)[0]


def mean_steps(folder: Path) -> dict[str, float]:
    """Mean timed step by backend."""
    return {
        record.backend.label: statistics.fmean(step_seconds(record)) for _, record in Store(folder).runs()[0]
    }


def _spread(name: str, ratios: dict[str, dict[str, list[float]]]) -> measuring.Result:
    spreads = {side: statistics.stdev(of_side[name]) for side, of_side in ratios.items()}
    middles = {side: math.exp(statistics.median(of_side[name])) for side, of_side in ratios.items()}
    ratio = spreads["turns"] / spreads["whole"]
    return measuring.Result(
        name=f"spread of {name} over {BASE}", ratio=ratio, lowest=ratio, highest=ratio, target=1.0,
        detail=", ".join(f"{side} {spreads[side]:.3f} around {middles[side]:.2f}" for side in SETTINGS),
    )  # fmt: skip


def _wall(seconds: dict[str, list[float]]) -> measuring.Result:
    ratios = [turns / whole for whole, turns in zip(seconds["whole"], seconds["turns"], strict=True)]
    middles = {side: statistics.median(of_side) for side, of_side in seconds.items()}
    return measuring.Result(
        name="wall time", ratio=statistics.median(ratios), lowest=min(ratios), highest=max(ratios),
        target=1.05,
        detail=f"{middles['turns']:.1f} s over {middles['whole']:.1f} s, rounds: {len(ratios)}",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
