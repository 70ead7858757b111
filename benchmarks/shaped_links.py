"""Measures step times on two nodes over links of known speed and predicts them from the bytes between nodes.

Starts a Slurm cluster of its own on this machine (see `make test-cluster`); needs root.
Usage: python -m benchmarks.shaped_links PREFIX_OF_SLURM OUTPUT_FOLDER
       python -m benchmarks.shaped_links OUTPUT_FOLDER     (write the page again from what was measured)
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path
from statistics import fmean, mean, median

from tabulate import tabulate

from benchmarks.links import crossover_bandwidth, seconds_over_link
from benchmarks.on_cluster import NOISE_RUNS, run_matrix
from benchmarks.publishing import publish
from harness.errors import HarnessError
from harness.fabric.result import read_fabric
from harness.judge.quantities import Run
from harness.judge.statistics import Ranking, Round, Timed
from harness.record import Record
from harness.record.store import ARCHIVE_NAME, read_runs
from harness.tell.sections.amounts import node_volumes
from harness.tell.tables import unranked_words
from tests.cluster.matrices import measured_fabric
from tests.cluster.slurm import SlurmCluster

BACKENDS = ("ddp", "zero2", "zero3", "fsdp", "fsdp-hybrid")
LINKS = {"unshaped": None, "1000mbit": 1000, "200mbit": 200}
"""Name of each link and its limit, Mbit/s."""
KNOWN = "unshaped"
"""The link whose step times enter the prediction."""
SLOWEST_OF_INTEREST = 125e3
"""Bytes per second. Strategies that differ by a few scalars cross at speeds that no link has."""
REPEATS = 8
"""Runs of each backend: two more than the fewest that can be put into an order."""
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

Prediction: T(w) = T(k) + B (1/w - 1/k) (`harness/forms/network.py`), where

- T(k) is the step time measured on the unshaped link,
- B is the traffic per step from one node to the other, from the collectives counted in the unshaped runs;
  gloo implements reduce-scatter as all-reduce, and B includes that,
- k and w are the all-reduce bus bandwidths that `harness fabric` measured on the unshaped and on the shaped
  link, mean of before and after.

No step time of a shaped link enters the prediction; what other programs took from the unshaped runs does.
A step time is the mean timed step of a run of {steps} steps; the tables hold the median of {runs} and, in
brackets, the least and the most.
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

    def seconds(self, backend: str) -> list[float]:
        """Mean timed step of each run of a backend."""
        own = (record for record in self.records if record.backend.label == backend)
        return [fmean(seconds) for record in own if (seconds := Run.of(record).step_seconds)]

    def median(self, backend: str) -> float:
        """Median over the runs of a backend, seconds."""
        return median(self.seconds(backend))

    @property
    def order(self) -> Ranking:
        """The order of the backends as far as their runs support one."""
        return _ranking({backend: self.seconds(backend) for backend in BACKENDS})

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
        "--set", f"compare.repeats={REPEATS}", *MODEL, *NOISE_RUNS, steps=STEPS,
    )  # fmt: skip
    self_test(cluster, here, folder / "fabric-after.json")
    publish(runs, folder)


def self_test(cluster: SlurmCluster, scratch: Path, result: Path) -> None:
    """Measure the all-reduce of the ranks of a run, placed on the nodes as in the run."""
    measured_fabric(
        cluster, scratch, "--operations", "all_reduce", "--max-size", "8MB", ranks_per_node=RANKS_PER_NODE
    )
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


def predicted(known: Link, link: Link, backend: str) -> list[float]:
    """Seconds of each run over the known link, moved to another one."""
    crossing = known.crossing_bytes(backend)
    return [
        seconds_over_link(seconds, crossing, known.bandwidth, link.bandwidth)
        for seconds in known.seconds(backend)
    ]


def tell(links: dict[str, Link]) -> str:
    """Predicted and measured step times, and their orders as far as the runs support them."""
    known = links[KNOWN]
    lines, swaps = [], []
    orders = [[KNOWN, "measured", _order(known.order)]]
    for name in list(LINKS)[1:]:
        link = links[name]
        foretold = {backend: predicted(known, link, backend) for backend in BACKENDS}
        for b in BACKENDS:
            error = link.median(b) / median(foretold[b]) - 1
            lines.append(
                [
                    name, b, f"{known.crossing_bytes(b) / 1e6:.2f}", _milliseconds(known.seconds(b)),
                    _milliseconds(foretold[b]), _milliseconds(link.seconds(b)), f"{error:+.0%}",
                ]
            )  # fmt: skip
        prediction = _ranking(foretold)
        swaps += _swaps(name, known.order, {"predicted": prediction, "measured": link.order})
        orders += [[name, "predicted", _order(prediction)], [name, "measured", _order(link.order)]]
    columns = (
        "link", "backend", "MB/step between nodes", "unshaped ms", "predicted ms", "measured ms",
        "difference",
    )  # fmt: skip
    bandwidths = [
        [name, ", ".join(f"{found * 8e-6:.0f}" for found in links[name].bandwidths)] for name in LINKS
    ]
    overtaken = _crossovers(known)
    return "\n\n".join(
        [
            _table(bandwidths, ("link", "all-reduce bus bandwidth, Mbit/s")),
            _table(lines, columns),
            "Order of step times. `<`: each backend before it is ahead of each after it, in all "
            "rounds\ntogether; `~`: not shown to differ in all pairs.",
            _table(orders, ("link", "", "order")),
            "Pairs whose order differs from the unshaped link beyond noise, predicted or measured:",
            _table(swaps, ("link", "", "faster now", "than")) if swaps else _none(links),
            "Bus bandwidth below which, by the same formula, a strategy with less traffic overtakes one\n"
            "that is faster on the unshaped link beyond noise:",
            _table(overtaken, ("overtakes", "overtaken", "below Mbit/s"))
            if overtaken
            else _none({KNOWN: known}),
        ]
    )


def _ranking(seconds: dict[str, list[float]]) -> Ranking:
    """The order of backends of step times in the order of the rounds."""
    rounds: dict[str, dict[Round, Timed]] = {
        backend: {(0, n): Timed(value) for n, value in enumerate(of)} for backend, of in seconds.items()
    }
    return Ranking(rounds, BACKENDS[0])


def _none(links: dict[str, Link]) -> str:
    """'None.', with the reason where there are too few runs to state an order."""
    unjudged = [name for name, link in links.items() if not link.order.is_judged]
    if not unjudged:
        return "None."
    return f"None is stated on {', '.join(unjudged)}: {unranked_words(links[unjudged[0]].order)}."


def _swaps(name: str, known: Ranking, others: dict[str, Ranking]) -> list[list[str]]:
    """Pairs whose order differs from the unshaped link, both beyond noise."""
    return [
        [name, how, after, before]
        for how, order in others.items()
        for before, after in permutations(BACKENDS, 2)
        if known.is_ahead(before, after) and order.is_ahead(after, before)
    ]


def _crossovers(known: Link) -> list[list[str]]:
    """Of pairs of which the one with more traffic is ahead on the known link."""
    found = []
    for fewer, more in permutations(BACKENDS, 2):
        sent = known.crossing_bytes(fewer), known.crossing_bytes(more)
        if sent[0] < sent[1] and known.order.is_ahead(more, fewer):
            bandwidth = crossover_bandwidth(
                (known.median(fewer), sent[0]), (known.median(more), sent[1]), known.bandwidth
            )
            if bandwidth is not None and bandwidth >= SLOWEST_OF_INTEREST:
                found.append([fewer, more, f"{bandwidth * 8e-6:.0f}"])
    return found


def _order(order: Ranking) -> str:
    """'a < b ~ c'; without enough runs why there is none."""
    if not order.is_judged:
        return unranked_words(order)
    cuts = [
        place
        for place in range(1, len(order.names))
        if all(order.is_ahead(left, r) for left in order.names[:place] for r in order.names[place:])
    ]
    tiers = [order.names[first:last] for first, last in pairwise([0, *cuts, len(order.names)])]
    return " < ".join(" ~ ".join(tier) for tier in tiers)


def _milliseconds(seconds: Sequence[float]) -> str:
    """'123 (118 to 131)'."""
    return f"{median(seconds) * 1e3:.0f} ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"


def _runs(links: dict[str, Link]) -> str:
    """'3 runs', '3 to 6 runs'."""
    counts = [len(link.seconds(backend)) for link in links.values() for backend in BACKENDS]
    return f"{min(counts)} runs" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} runs"


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
    links = read_links(output)
    text = tell(links)
    explanation = EXPLANATION.format(folder=f"reports/{output.name}", runs=_runs(links), steps=STEPS)
    (output / "README.md").write_text(f"{explanation}\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
