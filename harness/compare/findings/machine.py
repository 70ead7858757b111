"""Runs whose processors were not their own: taken by other work, or shared by their own ranks."""

from __future__ import annotations

from harness.compare import measures
from harness.compare.findings.finding import Finding, Kind
from harness.compare.rows import Row
from harness.compare.runs import Runs
from harness.compare.speed import node_threads, shares_cores
from harness.compare.wording import counted

KINDS = (
    Kind(
        id="busy-machine",
        title="A run began under a high load average",
        cause="Other programs, other runs, or processes of a run before kept the processors busy in the "
        "minute before the run began, and may have gone on. Which of them is not seen.",
        confirm="The values hold the load average of the last minute before the run, the cores, and the "
        "threads of the largest run of the table, which may have run just before. Threads are those of one "
        "node: nodes that share one machine's processors (containers, namespaces) count as one node here, so "
        "that the load may be what a run before left on all of them. Told where the load is more than cores "
        "and threads together, so a lesser load is no proof of a quiet machine; the report names the least "
        "and the most.",
        fix="Measure on a machine that does nothing else: under Slurm `exclusive: true` in the site file.",
    ),
    Kind(
        id="cores-shared",
        title="Ranks take turns on processor cores",
        cause="The ranks of a node compute with more threads than it has cores. Whoever waits for a "
        "collective also waits for a core, so the more often a strategy communicates, the more it loses.",
        confirm="`world.ranks_per_node` x `world.threads_per_rank` against `environment.cores`. Nodes that "
        "share one machine's processors (containers, namespaces) each count all of them; that is not seen.",
        fix="Fewer ranks, or a lower `runtime.threads_per_rank`. Losses, bytes and memory hold all the same.",
    ),
)


def find(runs: Runs) -> list[Finding]:
    """One finding per run that found more load than a run before it can have left, or had too few cores."""
    left = max((node_threads(row.record) for row in runs.rows), default=0)
    found = [_busy(row, left) for row in runs.rows] + [_shared(row) for row in runs.rows]
    return [finding for finding in found if finding is not None]


def _shared(row: Row) -> Finding | None:
    record = row.record
    if not shares_cores(record) or not measures.timed_steps(record):
        return None
    cores, threads = record.environment["cores"], node_threads(record)
    return Finding(
        id="cores-shared",
        about=row.cell,
        text=f"{threads} threads of a node share {counted(cores, 'core')}: "
        "speed and scaling are those of ranks that take turns",
        values={"threads": threads, "cores": cores},
    )


def _busy(row: Row, left: int) -> Finding | None:
    load = row.record.environment.get("load_average")
    cores = row.record.environment.get("cores")
    if load is None or not cores or load <= cores + left:
        return None
    return Finding(
        id="busy-machine",
        about=row.cell,
        # Without figures, so that cells which say the same are told together; the values hold them.
        text="the load average when the run began was above the cores and the threads of "
        "the largest run together: other work, or processes of a run before",
        values={"load_average": load, "cores": cores, "threads_of_largest_run": left},
    )
