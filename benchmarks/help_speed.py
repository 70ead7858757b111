"""Measures the wall time of `harness --help` over a bare interpreter start, interleaved."""

from __future__ import annotations

import statistics
import sys

import measuring

TARGET = 6.0


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="starts of each command")
    options = parser.parse_args()
    return measuring.present([measure(options.repeats)], as_json=options.json)


def measure(repeats: int = 20) -> measuring.Result:
    """Ratio of the medians; the spread is over the pairs."""
    help_command = [*measuring.harness_command(), "--help"]
    nothing = [sys.executable, "-c", "pass"]
    for command in (help_command, nothing):  # fills the file cache
        measuring.run_quietly(command)
    pairs = [
        (measuring.run_quietly(help_command)[0], measuring.run_quietly(nothing)[0]) for _ in range(repeats)
    ]
    help_seconds = statistics.median(seconds for seconds, _ in pairs)
    nothing_seconds = statistics.median(seconds for _, seconds in pairs)
    ratios = [with_help / without for with_help, without in pairs]
    return measuring.Result(
        name="help speed",
        ratio=help_seconds / nothing_seconds,
        lowest=min(ratios),
        highest=max(ratios),
        target=TARGET,
        detail=f"{help_seconds * 1e3:.0f} ms over {nothing_seconds * 1e3:.0f} ms, {repeats} starts each",
    )


if __name__ == "__main__":
    sys.exit(main())
