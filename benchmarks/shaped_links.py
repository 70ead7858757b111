"""Measures step times on two nodes over links of known speed and predicts them from the bytes between nodes.

Starts a Slurm cluster of its own on this machine (see `make test-cluster`); needs root.
Usage: python -m benchmarks.shaped_links PREFIX_OF_SLURM OUTPUT_FOLDER
       python -m benchmarks.shaped_links OUTPUT_FOLDER     (write the page again from what was measured)
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, median

from tabulate import tabulate

from benchmarks.on_cluster import NOISE_RUNS, run_matrix
from benchmarks.publishing import publish
from harness.compare.measures import step_seconds
from harness.compare.nodes import node_volumes
from harness.errors import HarnessError
from harness.fabric.result import read_fabric
from harness.record import Record
from harness.record_files import ARCHIVE_NAME
from harness.store import read_runs
from harness.theory.links import crossover_bandwidth, seconds_over_link
from tests.cluster.fabric import measured_fabric
from tests.cluster.slurm import SlurmCluster

BACKENDS = ("ddp", "zero2", "zero3", "fsdp", "fsdp-hybrid")
LINKS = {"unshaped": None, "1000mbit": 1000, "200mbit": 200}
"""Name of each link and its limit, Mbit/s."""
KNOWN = "unshaped"
"""The link whose step times enter the prediction."""
SLOWEST_OF_INTEREST = 125e3
"""Bytes per second. Strategies that differ by a few scalars cross at speeds that no link has."""
REPEATS = 3
STEPS = 20
RANKS_PER_NODE = 2
MODEL = (
    "--set", "model.config.hidden_size=256", "--set", "model.config.intermediate_size=688",
    "--set", "data.sequence_length=16",
)  # fmt: skip
"""Many parameters and few tokens, so that the link matters more than the processors that all ranks share."""
EXPLANATION = """\
# Step times over links of 200 Mbit/s and 1 Gbit/s

Two nodes with two CPU ranks each, gloo. The nodes are network namespaces of one machine; `tc` limits what
each sends on the data network. Each link has a folder with its records, its report and the network self-tests
right before and right after the runs (`fabric-*.json`).
`python -m benchmarks.shaped_links {folder}` computes this page again from these files.

Prediction: T(w) = T(k) + B (1/w - 1/k) (`harness/theory/links.py`), where

- T(k) is the step time measured on the unshaped link,
- B is the traffic per step from one node to the other, from the collectives counted in the unshaped runs;
  gloo implements reduce-scatter as all-reduce, and B includes that,
- k and w are the all-reduce bus bandwidths that `harness fabric` measured on the unshaped and on the shaped
  link, mean of before and after.

No step time of a shaped link enters the prediction. Step times are medians over the timed steps of
{repeats} runs of {steps} steps.
"""


@dataclass(frozen=True)
class Link:
    """What was measured over one link."""

    bandwidths: list[float]
    """All-reduce bus bandwidth of each self-test, in the order of time, bytes per second."""
    records: list[Record]

    @property
    def bandwidth(self) -> float:
        return mean(self.bandwidths)

    def seconds(self, backend: str) -> float:
        """Median of the timed steps of all runs of a backend."""
        return median(s for r in self.records if r.backend.label == backend for s in step_seconds(r))

    def crossing_bytes(self, backend: str) -> float:
        """Bytes per step to the other node, from the node that sends most."""
        record = next(r for r in self.records if r.backend.label == backend)
        return max(volume.between for volume in node_volumes(record))


def measure(cluster: SlurmCluster, scratch: Path, name: str, output: Path) -> None:
    """Run the matrix over one link between two self-tests; publish records, report and self-tests."""
    rate = LINKS[name]
    cluster.nodes.shape(None if rate is None else f"{rate}mbit")
    here, runs, folder = scratch / name, scratch / name / "runs", output / name
    runs.mkdir(parents=True)
    folder.mkdir()
    self_test(cluster, here, folder / "fabric-before.json")
    run_matrix(
        cluster, here, runs, "--backends", ",".join(BACKENDS), "--nodes", "2", "--nproc", str(RANKS_PER_NODE),
        "--repeats", str(REPEATS), *MODEL, *NOISE_RUNS, steps=STEPS,
    )  # fmt: skip
    self_test(cluster, here, folder / "fabric-after.json")
    publish(runs, folder)


def self_test(cluster: SlurmCluster, scratch: Path, result: Path) -> None:
    """Measure the all-reduce of the ranks of a run, placed on the nodes as in the run."""
    measured_fabric(
        cluster, scratch, "--operations", "all_reduce", "--max-size", "8MB", "--seconds-per-row", "2",
        ranks_per_node=RANKS_PER_NODE,
    )  # fmt: skip
    shutil.copy(scratch / "fabric.json", result)


def read_links(output: Path) -> dict[str, Link]:
    """Read what `measure` published. Raises HarnessError if a file is missing."""
    links = {}
    for name in LINKS:
        tests = [read_fabric(path) for path in (output / name).glob("fabric*.json")]
        if not tests:
            raise HarnessError(f"'{output / name}' holds no self-test of its network (fabric*.json)")
        found = [test.bus_bandwidth() for test in sorted(tests, key=lambda test: test.created_at)]
        records = [record for _, record in read_runs([output / name / ARCHIVE_NAME])[0]]
        links[name] = Link([bandwidth for bandwidth in found if bandwidth is not None], records)
    return links


def tell(links: dict[str, Link]) -> str:
    """Predicted and measured step times and orders."""
    known = links[KNOWN]
    swaps: list[list[str]] = []
    lines, orders = [], [[KNOWN, "measured", _order({b: known.seconds(b) for b in BACKENDS})]]
    for name in list(LINKS)[1:]:
        link = links[name]
        predicted = {
            b: seconds_over_link(known.seconds(b), known.crossing_bytes(b), known.bandwidth, link.bandwidth)
            for b in BACKENDS
        }
        measured = {b: link.seconds(b) for b in BACKENDS}
        for b in BACKENDS:
            lines.append(
                [
                    name, b, f"{known.crossing_bytes(b) / 1e6:.2f}", f"{known.seconds(b) * 1e3:.0f}",
                    f"{predicted[b] * 1e3:.0f}", f"{measured[b] * 1e3:.0f}",
                    f"{measured[b] / predicted[b] - 1:+.0%}",
                ]
            )  # fmt: skip
        swaps += _swaps(name, known, predicted, measured)
        orders += [[name, "predicted", _order(predicted)], [name, "measured", _order(measured)]]
    orders.append(["slowest", "predicted", _order({b: known.crossing_bytes(b) for b in BACKENDS})])
    bandwidths = [
        [name, ", ".join(f"{found * 8e-6:.0f}" for found in links[name].bandwidths)] for name in LINKS
    ]
    return "\n\n".join(
        [
            _table(bandwidths, ("link", "all-reduce bus bandwidth, Mbit/s")),
            _table(
                lines,
                (
                    "link",
                    "backend",
                    "MB/step between nodes",
                    "unshaped ms",
                    "predicted ms",
                    "measured ms",
                    "difference",
                ),
            ),
            _table(orders, ("link", "", "order of step times")),
            "Pairs whose order differs from the unshaped link, predicted or measured, and by how much the\n"
            "one that is now faster leads:",
            _table(swaps, ("link", "faster now", "than", "predicted", "measured")),
            "Bus bandwidth below which, by the same formula, a strategy with less traffic overtakes one\n"
            "that is faster on the unshaped link:",
            _table(_crossovers(known), ("overtakes", "overtaken", "below Mbit/s")),
        ]
    )


def _swaps(
    name: str, known: Link, predicted: dict[str, float], measured: dict[str, float]
) -> list[list[str]]:
    """Pairs whose order differs from the unshaped link."""
    found = []
    for pair in combinations(BACKENDS, 2):
        before, after = sorted(pair, key=known.seconds)
        gains = [seconds[before] / seconds[after] - 1 for seconds in (predicted, measured)]
        if max(gains) > 0:
            leads = [f"{gain:.0%}" if gain > 0 else f"no: {-gain:.0%} slower" for gain in gains]
            found.append([name, after, before, *leads])
    return found


def _crossovers(known: Link) -> list[list[str]]:
    found = []
    for pair in combinations(BACKENDS, 2):
        fewer, more = sorted(pair, key=known.crossing_bytes)
        bandwidth = crossover_bandwidth(
            *((known.seconds(b), known.crossing_bytes(b)) for b in (fewer, more)), known.bandwidth
        )
        if bandwidth is not None and bandwidth >= SLOWEST_OF_INTEREST:
            found.append([fewer, more, f"{bandwidth * 8e-6:.0f}"])
    return found


def _order(amounts: dict[str, float]) -> str:
    return " < ".join(sorted(amounts, key=lambda backend: amounts[backend]))


def _table(rows: list[list[str]], headers: tuple[str, ...]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    *prefix, output = map(Path, sys.argv[1:])
    if prefix:
        output.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as scratch:
            cluster = SlurmCluster(Path(scratch) / "slurm", prefix[0], 2)
            try:
                for name in LINKS:
                    measure(cluster, Path(scratch), name, output)
            finally:
                cluster.close()
    text = tell(read_links(output))
    explanation = EXPLANATION.format(folder=f"reports/{output.name}", repeats=REPEATS, steps=STEPS)
    (output / "README.md").write_text(f"{explanation}\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
