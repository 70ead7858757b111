"""Runs without processors of their own: busy with other work, or shared by the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judge import measures
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.speed import node_threads, shares_cores
from harness.judge.wording import counted, listed
from harness.record import Record

LEAST_CORES = 0.2
"""With so much of its core taken a rank is 1.25 times slower: what counts as a slow rank."""


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
