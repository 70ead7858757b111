"""Runs one backend through the command line and then prints what crossed `lo`, as JSON.

In a namespace of its own: `python -m tests.wire.job RUNS BACKEND RANKS STEPS COUNTED`.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.wire.namespace import traffic

MODEL = "{hidden_size: 256, intermediate_size: 512, num_hidden_layers: 4, max_position_embeddings: 16}"
WARMUP_STEPS = 3


def settings(steps: int, counted: int) -> list[str]:
    """A small batch on a model whose weights are much more than what the ranks say to each other."""
    return [
        f"training.steps={steps}", f"measure.counted_steps={counted}",
        f"measure.warmup_steps={WARMUP_STEPS}", "measure.weight_digests=false", f"model.config={MODEL}",
        "training.micro_batch_size=1", "data.sequence_length=16", "runtime.threads_per_rank=1",
    ]  # fmt: skip


if __name__ == "__main__":
    runs, backend, ranks, steps, counted = sys.argv[1:]
    command = [sys.executable, "-m", "harness", "run", "--backend", backend, "--nproc", ranks, "--runs", runs]
    for setting in settings(int(steps), int(counted)):
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=sys.stderr)
    print(json.dumps(vars(traffic())))  # noqa: T201
