"""Step times of strategies on two nodes over links of known speed, beside what their bytes predict.

Starts a Slurm cluster of its own on this machine (see `make test-cluster`); needs root.
Usage: python benchmarks/shaped_links.py PREFIX_OF_SLURM OUTPUT_FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

from harness.compare.measures import median_step_seconds
from harness.compare.nodes import node_volumes
from harness.record import Record
from tests.cluster.matrices import render
from tests.cluster.slurm import SlurmCluster

BACKENDS = ("ddp", "zero2", "zero3", "fsdp", "fsdp-hybrid")
RATES_MEGABITS = (None, 1000, 200)
# Ethernet, IP and TCP take 66 of 1514 bytes of a full frame.
PAYLOAD_SHARE = 1448 / 1514
MODEL = ("--set", "model.config.hidden_size=192", "--set", "model.config.intermediate_size=512")


def name_of(rate: int | None) -> str:
    return "unshaped" if rate is None else f"{rate}mbit"


def measure(cluster: SlurmCluster, scratch: Path, rate: int | None, output: Path) -> dict[str, Record]:
    """Run the matrix over one speed; keep its records and its report."""
    cluster.nodes.shape(None if rate is None else f"{rate}mbit")
    matrix = render(
        cluster, scratch / name_of(rate), "--backends", ",".join(BACKENDS), "--nodes", "2", "--nproc", "2",
        *MODEL, steps=16,
    )  # fmt: skip
    # One job at a time: two would share the processors.
    path = matrix.folder / "jobs" / "matrix.json"
    document = json.loads(path.read_text())
    document["site"]["max_queued_jobs"] = 1
    path.write_text(json.dumps(document))
    matrix.harness("submit", "--wait", "--poll-seconds", "0.5")
    folder = output / name_of(rate)
    for record in sorted((matrix.folder / "runs").glob("*/record.json")):
        target = folder / "runs" / record.parent.name
        target.mkdir(parents=True)
        shutil.copy(record, target)
    cluster.harness("report", folder / "runs", "-o", folder / "report.md", cwd=scratch)
    return {record.backend.label: record for record in matrix.records()}


def seconds(record: Record) -> float:
    median = median_step_seconds(record)
    if median is None:
        raise SystemExit(f"{record.run_id} has no timed step: {record.error}")
    return median


def crossing_bytes(record: Record) -> float:
    """Of the node that sends most, per step."""
    return max(volume.between for volume in node_volumes(record))


def tell(found: dict[int | None, dict[str, Record]]) -> str:
    """Predicted and measured step times and orders."""
    lines, orders = [], []
    for rate in RATES_MEGABITS[1:]:
        assert rate is not None
        speed = rate * 1e6 / 8 * PAYLOAD_SHARE
        base, shaped = found[None], found[rate]
        predicted = {b: seconds(base[b]) + crossing_bytes(base[b]) / speed for b in BACKENDS}
        measured = {b: seconds(shaped[b]) for b in BACKENDS}
        for backend in BACKENDS:
            lines.append(
                [
                    f"{rate} Mbit/s", backend, f"{crossing_bytes(base[backend]) / 1e6:.2f}",
                    f"{seconds(base[backend]) * 1e3:.0f}", f"{predicted[backend] * 1e3:.0f}",
                    f"{measured[backend] * 1e3:.0f}",
                ]
            )  # fmt: skip
        for kind, times in (("predicted", predicted), ("measured", measured)):
            orders.append([f"{rate} Mbit/s", kind, " < ".join(sorted(BACKENDS, key=lambda b: times[b]))])
    by_bytes = sorted(BACKENDS, key=lambda b: crossing_bytes(found[None][b]))
    orders.append(["any", "by crossing bytes alone", " < ".join(by_bytes)])
    orders.insert(
        0, ["unshaped", "measured", " < ".join(sorted(BACKENDS, key=lambda b: seconds(found[None][b])))]
    )
    headers = ("link", "backend", "crossing MB/step", "unshaped ms", "predicted ms", "measured ms")
    table = tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
    return f"{table}\n\n{tabulate(orders, headers=('link', 'order', ''), tablefmt='github')}\n"


def main() -> None:
    prefix, output = Path(sys.argv[1]), Path(sys.argv[2])
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        cluster = SlurmCluster(Path(scratch) / "slurm", prefix, 2)
        try:
            found = {r: measure(cluster, Path(scratch), r, output) for r in RATES_MEGABITS}
        finally:
            cluster.close()
    text = tell(found)
    (output / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
