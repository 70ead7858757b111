"""Measures `harness estimate` of Llama-3.1-405B on 4,096 GPUs, every strategy, and `harness recommend` of
Llama-3.1-8B on 64: processor time and memory."""

from __future__ import annotations

import resource
import subprocess
import sys

import measuring

MOST_BYTES = 2 * 2**30
ESTIMATE = (
    "estimate", "--model", "Llama-3.1-405B", "--world-size", "4096", "--gpu", "H100-80", "--fabric", "NDR400",
    "--set", "training.precision=bf16-mixed", "--set", "data.sequence_length=8192",
    "--set", "training.micro_batch_size=1",
)  # fmt: skip
RECOMMEND = (
    "recommend", "--model", "llama-3.1-8b", "--gpus", "64", "--gpu", "H100-80", "--fabric", "NDR400",
    "--tokens-per-step", "4M",
)  # fmt: skip
MOST_SECONDS = {ESTIMATE: 10.0, RECOMMEND: 8.0}
"""Of processor time, by question; that at a batch says what a search takes, too."""


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="starts of the command")
    options = parser.parse_args()
    return measuring.present(measure(options.repeats), as_json=options.json)


def measure(repeats: int = 5) -> list[measuring.Result]:
    """The least processor time counts, because other work on the machine only adds to it."""
    return [result for question in MOST_SECONDS for result in _measure(question, repeats)]


def _measure(question: tuple[str, ...], repeats: int) -> list[measuring.Result]:
    command = [*measuring.harness_command(), *question]
    seconds, most = [], 0
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        most = max(most, after.ru_maxrss * 1024)
    shares = [took / MOST_SECONDS[question] for took in seconds]
    return [
        measuring.Result(
            name=f"{question[0]} seconds", ratio=min(shares), lowest=min(shares), highest=max(shares),
            target=1.0, detail=f"{min(seconds):.1f} s of processor time",
        ),
        measuring.Result(
            name=f"{question[0]} memory", ratio=most / MOST_BYTES, lowest=most / MOST_BYTES,
            highest=most / MOST_BYTES, target=1.0, detail=f"{most / 2**20:.0f} MiB",
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
