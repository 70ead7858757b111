"""Measures the step time in the harness over a bare loop, from pairs of runs in alternating order."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence

import measuring

TARGET = 1.02
BACKENDS = ("ddp", "zero3", "fsdp")
# Bigger than the default job, so that a step is arithmetic rather than Python and scheduling.
HIDDEN_SIZE = 256
INTERMEDIATE_SIZE = 704
LAYERS = 4
LOSS_TOLERANCE = 1e-3
Pair = tuple[float, float]


def main() -> int:
    parser = measuring.options(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="paired repeats of each backend")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated")
    options = parser.parse_args()
    results = measure(options.backends.split(","), options.pairs, options.steps)
    return measuring.present(results, as_json=options.json)


def measure(backends: Sequence[str] = BACKENDS, pairs: int = 5, steps: int = 40) -> list[measuring.Result]:
    """The median ratio of each backend."""

    def pair(backend: str, first: bool) -> tuple[float, float]:
        return one_pair(backend, steps, harness_first=first)

    return measuring.paired("step time", backends, pairs, pair, ("harness", "bare"), TARGET)


def one_pair(backend: str, steps: int, *, harness_first: bool) -> Pair:
    """Median seconds of the timed steps in the harness, and of the same steps in the bare loop."""
    if harness_first:
        record = run_harness(backend, steps)
        bare = run_bare(backend, steps)
    else:
        bare = run_bare(backend, steps)
        record = run_harness(backend, steps)
    timed = [row for row in record["steps"] if row["window"] == "timed"]
    for row in timed:
        difference = abs(row["loss"] - bare["losses"][row["step"]])
        if not difference < LOSS_TOLERANCE:
            raise SystemExit(
                f"{backend}: losses differ by {difference} at step {row['step']}: not the same job"
            )
    return (
        statistics.median(row["seconds"] for row in timed),
        statistics.median(bare["step_seconds"][row["step"]] for row in timed),
    )


def run_harness(backend: str, steps: int) -> dict:
    """Run in the harness and return the record."""
    settings = {
        "training.steps": steps,
        "training.deterministic": "false",  # as the bare loops leave it
        "model.config.hidden_size": HIDDEN_SIZE,
        "model.config.intermediate_size": INTERMEDIATE_SIZE,
        "model.config.num_hidden_layers": LAYERS,
        "runtime.device": "cpu",
    }
    assignments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as runs:
        command = [*measuring.harness_command(), "run", "--json", "--backend", backend, "--runs", runs]
        command += ["--nproc", str(measuring.RANKS), *assignments]
        return json.loads(measuring.run_quietly(command)[1])


def run_bare(backend: str, steps: int) -> dict:
    """Seconds and losses of the bare loop."""
    arguments = ["--steps", str(steps), "--hidden-size", str(HIDDEN_SIZE)]
    arguments += ["--intermediate-size", str(INTERMEDIATE_SIZE), "--layers", str(LAYERS)]
    command = measuring.bare_command(backend, *arguments)
    return measuring.bare_document(measuring.run_quietly(command)[1])


if __name__ == "__main__":
    sys.exit(main())
