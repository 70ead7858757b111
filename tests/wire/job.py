"""Runs one backend twice through the command line, inside a namespace: what probed steps moved on `lo`.

The second run has the probed steps and the first has not; else both are alike.
"""

from __future__ import annotations

from pathlib import Path

from tests.harness.cli.command_line import harness
from tests.wire.namespace import Traffic, traffic

MODEL = "{hidden_size: 256, intermediate_size: 512, num_hidden_layers: 4, max_position_embeddings: 16}"
WARMUP_STEPS = 3


def settings(steps: int, probed: int) -> list[str]:
    """A small batch on a model whose weights are much more than what the ranks say to each other."""
    return [
        f"training.steps={steps}", f"measure.probed_steps={probed}",
        f"measure.warmup_steps={WARMUP_STEPS}", "measure.weight_digests=false", f"model.config={MODEL}",
        "training.micro_batch_size=1", "data.sequence_length=16", "runtime.threads_per_rank=1",
    ]  # fmt: skip


def moved_by(folder: Path, backend: str, ranks: int, probed: int) -> Traffic:
    """What a run with so many probed steps sends, from its first word to its last."""
    command = ["run", "--backend", backend, "--nproc", str(ranks), "--runs", "runs"]
    for setting in settings(WARMUP_STEPS + probed, probed):
        command += ["--set", setting]
    folder.mkdir()
    before = traffic()
    done = harness(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return traffic() - before


def moved_by_probed_steps(folder: str, backend: str, ranks: int, probed: int) -> dict[str, int]:
    """The fields of the traffic of a run with probed steps, less that of one without."""
    without = moved_by(Path(folder) / "without", backend, ranks, 0)
    return vars(moved_by(Path(folder) / "with", backend, ranks, probed) - without)
