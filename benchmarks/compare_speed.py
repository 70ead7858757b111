"""Wall time of `harness compare` over eight backends, over that of eight plain torchrun starts."""

from __future__ import annotations

import statistics
import sys
import tempfile

import measuring

TARGET = 0.4


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="pairs of a comparison and eight starts")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    options = parser.parse_args()
    return measuring.present([measure(options.repeats, options.steps)], as_json=options.json)


def measure(repeats: int = 1, steps: int = 20) -> measuring.Result:
    """The median ratio; both sides train the same eight, the reference of one process among them."""
    pairs = []
    for number in range(repeats):
        if number % 2 == 0:
            compare = compare_seconds(steps)
            bare = bare_seconds(steps)
        else:
            bare = bare_seconds(steps)
            compare = compare_seconds(steps)
        pairs.append((compare, bare))
    ratios = [compare / bare for compare, bare in pairs]
    compare = statistics.median(compare for compare, _ in pairs)
    bare = statistics.median(bare for _, bare in pairs)
    return measuring.Result(
        name="compare speed",
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        target=TARGET,
        detail=f"{compare:.1f} s over {bare:.1f} s, repeats: {repeats}",
    )


def compare_seconds(steps: int) -> float:
    """One comparison of all backends into an empty folder."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as runs:
        command = [*measuring.harness_command(), "compare", "--fresh", "--strict", "--runs", runs]
        command += ["--backends", ",".join(measuring.BARE_LOOPS), "--nproc", str(measuring.RANKS)]
        command += ["--set", f"training.steps={steps}", "--set", "runtime.device=cpu"]
        seconds, _ = measuring.run_quietly(command)
    measuring.progress(f"compare speed: harness compare {seconds:.1f} s")
    return seconds


def bare_seconds(steps: int) -> float:
    """Every bare loop started for itself, one after the other."""
    total = 0.0
    for backend in measuring.BARE_LOOPS:
        seconds, _ = measuring.run_quietly(measuring.bare_command(backend, "--steps", str(steps)))
        measuring.progress(f"compare speed: bare {backend} {seconds:.1f} s")
        total += seconds
    return total


if __name__ == "__main__":
    sys.exit(main())
