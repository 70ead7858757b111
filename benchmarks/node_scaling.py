"""Runs the default strategies on 1, 2 and 4 nodes of a Slurm cluster; writes records, a report and a page.

Starts a Slurm cluster of its own on this machine (see `make test-cluster`); needs root.
Usage: python -m benchmarks.node_scaling PREFIX_OF_SLURM OUTPUT_FOLDER
       python -m benchmarks.node_scaling OUTPUT_FOLDER     (write the page again from its records)
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.on_cluster import NOISE_RUNS, run_matrix
from benchmarks.publishing import publish
from harness.record import Record
from harness.record.store import ARCHIVE_NAME, read_runs
from tests.cluster.slurm import SlurmCluster

BACKENDS = "ddp,zero1,zero2,zero3,fsdp,fsdp-hybrid"
WARM = ("--set", "measure.warmup_steps=3")
"""The first two forward passes of ZeRO-3 differ from later ones; the probes skip them."""
EQUAL = "losses equal, final weights equal"
WORLDS = (("2,4", "2"), ("1", "4"), ("1", "2"))
"""Numbers of nodes, ranks per node. Four ranks run on one node and on two nodes."""
EXPLANATION = """\
# Strategies on 1, 2 and 4 nodes: is it the same job?

{answer}

The four nodes of this Slurm cluster are network namespaces of one machine. The scaling in the report shows
how two processors slow down with more ranks, not what more nodes would gain. It does show that the runs are
the same job. `python -m benchmarks.node_scaling PREFIX FOLDER` makes this folder, and
`python -m benchmarks.node_scaling FOLDER` writes this page again from its records.

Equal world sizes on different numbers of nodes, losses of all steps and final weights compared bit by bit
(the report compares every run with one process, within rounding):

"""


def main() -> None:
    *prefix, output = map(Path, sys.argv[1:])
    if prefix:
        measure(prefix[0], output)
    text = page([record for _, record in read_runs([output / ARCHIVE_NAME])[0]])
    (output / "README.md").write_text(text, encoding="utf-8")
    print(text)


def measure(prefix: Path, output: Path) -> None:
    """Run all worlds on a cluster of four nodes; keep records and reports."""
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        cluster = SlurmCluster(scratch / "slurm", prefix, 4, cpus_per_node=4)
        try:
            for number, (nodes, nproc) in enumerate(WORLDS):
                words = ("--backends", BACKENDS, "--nodes", nodes, "--nproc", nproc, *NOISE_RUNS, *WARM)
                run_matrix(cluster, scratch / str(number), scratch / "runs", *words, steps=16)
        finally:
            cluster.close()
        publish(scratch / "runs", output)


def page(records: list[Record]) -> str:
    """The answer, how it was measured, and a line for each cell."""
    lines = tell(records)
    equal = sum(line.endswith(EQUAL) for line in lines)
    answer = (
        f"{equal} of {len(lines)} cells that ran on several numbers of nodes have losses and final weights "
        "that are equal bit by bit."
    )
    return EXPLANATION.replace("{answer}", answer) + "\n".join(lines) + "\n"


def tell(records: list[Record]) -> list[str]:
    """Whether equal world sizes train bit by bit alike, however many nodes they have."""
    worlds: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        worlds[record.backend.label, record.world.world_size].append(record)
    lines = []
    for (label, size), runs in worlds.items():
        nodes = sorted({run.world.nodes for run in runs})
        if len(nodes) > 1:
            losses = {tuple(step.loss for step in run.steps) for run in runs}
            weights = {run.final_weights.digest if run.final_weights else run.run_id for run in runs}
            equality = f"losses {_alike(losses)}, final weights {_alike(weights)}"
            lines.append(f"- {label}, {size} ranks on {' and '.join(map(str, nodes))} nodes: {equality}")
    return lines


def _alike(found: set[Any]) -> str:
    return "equal" if len(found) == 1 else "DIFFER"


if __name__ == "__main__":
    main()
