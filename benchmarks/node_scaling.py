"""The default strategies over 1, 2 and 4 nodes of a Slurm cluster, and on one node: records and a report.

Starts a Slurm cluster of its own on this machine (see `make test-cluster`); needs root.
Usage: python -m benchmarks.node_scaling PREFIX_OF_SLURM OUTPUT_FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.on_cluster import keep, run_matrix
from harness.record import Record
from tests.cluster.slurm import SlurmCluster

BACKENDS = "ddp,zero1,zero2,zero3,fsdp,fsdp-hybrid"
WORLDS = (("2,4", "2"), ("1", "4"), ("1", "2"))
"""Numbers of nodes, ranks per node. Four ranks run on one node and on two."""
EXPLANATION = """\
# The default strategies over 1, 2 and 4 nodes

A Slurm cluster of four nodes, which are network namespaces of one machine: what the report says of scaling is
how much slower two processors become with more ranks, not what more nodes would bring. What it shows is that
the runs are the same job. `python -m benchmarks.node_scaling PREFIX FOLDER` makes this folder.

Equal worlds on other numbers of nodes, losses of all steps compared bit by bit:

"""
FLOOR = ("--set", "compare.floor=true")


def main() -> None:
    prefix, output = map(Path, sys.argv[1:])
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        cluster = SlurmCluster(scratch / "slurm", prefix, 4, cpus_per_node=4)
        try:
            for number, (nodes, nproc) in enumerate(WORLDS):
                words = ("--backends", BACKENDS, "--nodes", nodes, "--nproc", nproc, *FLOOR)
                run_matrix(cluster, scratch / str(number), scratch / "runs", *words, steps=8)
        finally:
            cluster.close()
        records = keep(scratch / "runs", output)
    text = tell(records)
    (output / "README.md").write_text(EXPLANATION + text + "\n")
    print(text)


def tell(records: list[Record]) -> str:
    """Whether equal worlds train bit by bit alike, however many nodes they have."""
    losses: dict[tuple[str, int], dict[int, list[float | None]]] = defaultdict(dict)
    for record in records:
        key = record.backend.label, record.world.world_size
        losses[key][record.world.nodes] = [step.loss for step in record.steps]
    lines = []
    for (label, size), by_nodes in losses.items():
        if len(by_nodes) > 1:
            equal = len({tuple(found) for found in by_nodes.values()}) == 1
            nodes = " and ".join(map(str, sorted(by_nodes)))
            lines.append(f"- {label}, {size} ranks on {nodes} nodes: losses {'equal' if equal else 'DIFFER'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
