"""Measures timed steps of runs with probes over runs without, both runs of a pair at the same time.

Run one after the other, two runs with equal settings differ by up to 10 % on a shared host, whose speed
changes within seconds. The two therefore run simultaneously, each on its own core, and swap cores from pair
to pair: disturbances affect both (duet benchmarking: Bulej et al., ICPE 2020).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import measuring
import step_time

TARGET = 1.01
BACKENDS = ("ddp", "zero3", "fsdp")
# Both sides time the same steps of the same job; without probes the steps before them are all warm-up.
WITH_PROBES = {
    "measure.warmup_steps": 3,
    "measure.probed_steps": 2,
    "measure.traced_steps": 1,
    "measure.cooldown_steps": 3,
}
WITHOUT_PROBES = {"measure.warmup_steps": 9, "measure.probed_steps": 0, "measure.traced_steps": 0}


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
        return one_pair(backend, steps, swapped=not first)

    return measuring.paired("probe cost", backends, pairs, pair, ("with", "without"), TARGET)


def one_pair(backend: str, steps: int, *, swapped: bool) -> step_time.Pair:
    """Median seconds of the timed steps with and without probes, measured at the same time."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise SystemExit("probe cost: 1 core is available; two runs side by side need 2")
    cores = available[1::-1] if swapped else available[:2]
    with ThreadPoolExecutor(max_workers=2) as side_by_side:
        seconds = list(
            side_by_side.map(
                lambda of: timed_median(backend, steps, *of),
                zip((WITH_PROBES, WITHOUT_PROBES), cores, strict=True),
            )
        )
    return seconds[0], seconds[1]


def timed_median(backend: str, steps: int, measure_settings: dict[str, int], core: int) -> float:
    """Median seconds of the timed steps of a run on one core; exits if a probe worked in them."""
    settings = {
        "training.steps": steps,
        "model.config.hidden_size": step_time.HIDDEN_SIZE,
        "model.config.intermediate_size": step_time.INTERMEDIATE_SIZE,
        "model.config.num_hidden_layers": step_time.LAYERS,
        "runtime.device": "cpu",
        **measure_settings,
    }
    assignments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as runs:
        command = ["taskset", "--cpu-list", str(core), *measuring.harness_command(), "run", "--json"]
        command += ["--backend", backend, "--runs", runs, "--nproc", str(measuring.RANKS), *assignments]
        record = json.loads(measuring.run_quietly(command)[1])
    at_work = {probe for rank in record["ranks"] for probe in rank["timed_probes"]}
    if at_work:
        raise SystemExit(f"{backend}: probes at work in the timed steps: {', '.join(sorted(at_work))}")
    return statistics.median(row["seconds"] for row in record["steps"] if row["window"] == "timed")


if __name__ == "__main__":
    sys.exit(main())
