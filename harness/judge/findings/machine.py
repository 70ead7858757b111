"""Runs without processors of their own: busy with other work, or shared by the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge import measures
from harness.judge.findings.finding import Finding, Kind
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.speed import node_threads, shares_cores
from harness.judge.wording import counted, listed
from harness.record import Record

LEAST_CORES = 0.2
"""With so much of its core taken a rank is 1.25 times slower: what counts as a slow rank."""

KINDS = (
    Kind(
        id="busy-machine",
        title="Other work used processors that a run needed",
        cause="Other programs, other runs, processes of an earlier run, or other guests of the same "
        "hypervisor kept the processors busy.",
        confirm="The values hold the cores that anything but the ranks used from the first timed step to the "
        "end of the training, as Linux counts it (`ranks[].processors` of the record), of nodes the most. "
        "Reported if that exceeds the cores that the ranks' threads leave free by a fifth of a core, enough "
        "to make one rank 1.25 times slower. Nodes that share one machine's processors (containers, "
        "namespaces) count as one node. Records "
        "without `processors` (older ones, systems other than Linux, runs that timed nothing) are judged by "
        "the load average of the minute before the run: reported if it exceeds the cores and the threads of "
        "the largest run of the table combined, since that run may have ended just before.",
        fix="Measure on an otherwise idle machine: under Slurm `exclusive: true` in the site file.",
    ),
    Kind(
        id="cores-shared",
        title="Ranks share processor cores",
        cause="The ranks of a node compute with more threads than it has cores. A rank that waits for a "
        "collective also waits for a core, so a strategy loses more the more often it communicates.",
        confirm="`world.ranks_per_node` x `world.threads_per_rank` against `environment.cores`. Nodes that "
        "share one machine's processors (containers, namespaces) each count all of them, unnoticed.",
        fix="Use fewer ranks or a lower `runtime.threads_per_rank`. Losses, bytes and memory stay valid.",
    ),
    Kind(
        id="numa-unbound",
        title="Ranks are not bound to a NUMA node, or to that of their GPU",
        cause="The system may move a rank to processors whose memory, or whose path to the GPU, is that of "
        "another socket: pinned memory, optimizer states on the host and kernel launches get slower, "
        "and times vary from run to run.",
        confirm="`ranks[].placement` of the record: processors of the rank's affinity mask, their NUMA "
        "nodes, and the NUMA node of its GPU. Reported if the processors lie on several NUMA nodes although "
        "those of one would do for the rank's threads, or if none of them lies on the GPU's.",
        fix="Slurm: `--cpu-bind=cores` or `--gpu-bind=closest`; otherwise start each rank through `numactl "
        "--cpunodebind=N --membind=N`, with the node that `nvidia-smi topo -m` names. Losses, bytes and "
        "memory stay valid.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """One finding per run beside which other work used processors, or that had too few cores."""
    left = max((node_threads(row.record) for row in runs.rows), default=0)
    found = [_busy(row, left) for row in runs.rows]
    found += [judge(row) for judge in (_shared, _unbound) for row in runs.rows]
    return [finding for finding in found if finding is not None]


def _shared(row: Row) -> Finding | None:
    record = row.record
    if not shares_cores(record) or not measures.timed_steps(record):
        return None
    cores, threads = record.environment.cores or 0, node_threads(record)
    return Finding(
        id="cores-shared",
        about=row.cell,
        text=f"{threads} threads per node share {counted(cores, 'core')}: "
        "speed and scaling say little about the strategies",
        values={"threads": threads, "cores": cores},
    )


def _unbound(row: Row) -> Finding | None:
    record = row.record
    if record.on_stub or not measures.timed_steps(record):
        return None
    threads = record.world.threads_per_rank if record.world.device == "cpu" else 1
    places = {rank.rank: rank.placement for rank in record.ranks if rank.placement is not None}
    far = [r for r, p in places.items() if p.numa_nodes and p.device_numa_node not in (None, *p.numa_nodes)]
    loose = [
        r for r, p in places.items()
        if len(p.numa_nodes) > 1 and p.processor_count // len(p.numa_nodes) >= threads
    ]  # fmt: skip
    if not far and not loose:
        return None
    worst = far or loose
    nodes = sorted({node for rank in worst for node in places[rank].numa_nodes})
    text = f"{_numbered('rank', worst)} may run on processors of {_numbered('NUMA node', nodes)} " + (
        "only, and the GPU lies on another" if far else "in turn"
    )
    values = {"ranks": {str(rank): places[rank].model_dump() for rank in worst}}
    return Finding(id="numa-unbound", about=row.cell, text=text, values=values)


def _numbered(name: str, numbers: Sequence[int]) -> str:
    """'rank 3', 'ranks 0 and 1'."""
    return f"{name if len(numbers) == 1 else name + 's'} {listed([str(number) for number in numbers])}"


def _busy(row: Row, left: int) -> Finding | None:
    if row.record.status == "unsupported" or row.record.on_stub:
        return None
    cores, used = row.record.environment.cores, row.run.disturbance
    if used is None or not cores:
        return _started_busy(row, left)
    threads = _needed_threads(row.record)
    needed = used.other_cores - max(0, cores - threads)
    if needed <= LEAST_CORES:
        return None
    return Finding(
        id="busy-machine",
        about=row.cell,
        # Without figures, so that findings of several cells merge into one sentence; the values hold them.
        text="other programs, or other guests of the host, used processors that the ranks needed during the "
        "timed steps",
        values={"other_cores": used.other_cores, "cores": cores, "threads": threads},
    )


def _needed_threads(record: Record) -> int:
    """Of one node: a rank that computes on a GPU keeps one thread busy with launching."""
    return node_threads(record) if record.world.device == "cpu" else record.world.ranks_per_node


def _started_busy(row: Row, left: int) -> Finding | None:
    """By the load average: of a run that did not record what others used."""
    load, cores = row.record.environment.load_average, row.record.environment.cores
    if load is None or not cores or load <= cores + left:
        return None
    return Finding(
        id="busy-machine",
        about=row.cell,
        text="the load average at the start exceeded cores and threads of the largest run combined: other "
        "work, or processes of an earlier run",
        values={"load_average": load, "cores": cores, "threads_of_largest_run": left},
    )
