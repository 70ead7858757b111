"""Measures the wall time of `harness compare` on eight backends over eight plain torchrun starts."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence

import measuring

TARGET = 0.4


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="rounds of two comparisons and eight starts")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    options = parser.parse_args()
    return measuring.present(measure(options.repeats, options.steps), as_json=options.json)


def measure(repeats: int = 1, steps: int = 20) -> list[measuring.Result]:
    """Median ratios: with as many runs as starts, and with the runs that `compare` makes by default.

    Both sides train the same eight backends, the one-process reference included. The ninth run of `compare`
    repeats the reference to measure rounding; the other side has no such run.
    """
    sides: dict[str, Callable[[int], float]] = {
        "eight": lambda steps: compare_seconds(steps, "compare.noise_runs=false"),
        "default": compare_seconds,
        "bare": bare_seconds,
    }
    rounds: list[dict[str, float]] = []
    for number in range(repeats):
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        rounds.append({name: sides[name](steps) for name in names})
    return [
        _result("compare speed, 8 runs over 8 starts", "eight", rounds),
        _result("compare speed, with the repetition for rounding: 9 over 8", "default", rounds),
    ]


def _result(name: str, side: str, rounds: Sequence[dict[str, float]]) -> measuring.Result:
    ratios = [seconds[side] / seconds["bare"] for seconds in rounds]
    compare, bare = (statistics.median(seconds[key] for seconds in rounds) for key in (side, "bare"))
    return measuring.Result(
        name=name,
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        target=TARGET,
        detail=f"{compare:.1f} s over {bare:.1f} s, repeats: {len(rounds)}",
    )


def compare_seconds(steps: int, *assignments: str) -> float:
    """One comparison of all backends into an empty folder."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as runs:
        command = [*measuring.harness_command(), "compare", "--fresh", "--strict", "--runs", runs]
        command += ["--backends", ",".join(measuring.BARE_LOOPS), "--nproc", str(measuring.RANKS)]
        for assignment in (f"training.steps={steps}", "runtime.device=cpu", *assignments):
            command += ["--set", assignment]
        seconds, _ = measuring.run_quietly(command)
    measuring.progress(f"compare speed: harness compare {' '.join(assignments)} {seconds:.1f} s")
    return seconds


def bare_seconds(steps: int) -> float:
    """Wall seconds of all bare loops, each in its own start, one after the other."""
    total = 0.0
    for backend in measuring.BARE_LOOPS:
        seconds, _ = measuring.run_quietly(measuring.bare_command(backend, "--steps", str(steps)))
        measuring.progress(f"compare speed: bare {backend} {seconds:.1f} s")
        total += seconds
    return total


if __name__ == "__main__":
    sys.exit(main())
