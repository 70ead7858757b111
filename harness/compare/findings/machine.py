"""Runs without processors of their own: busy with other work, or shared by the ranks."""

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
        title="A run started under a high load average",
        cause="Other programs, other runs, or processes of an earlier run kept the processors busy in the "
        "minute before the run started, and may have continued. The harness cannot tell which.",
        confirm="The values hold the load average of the last minute before the run, the cores, and the "
        "threads of the largest run of the table, which may have run just before. Threads are those of one "
        "node: nodes that share one machine's processors (containers, namespaces) count as one node here, so "
        "an earlier run on all of them may explain the load. Reported only if the load exceeds cores and "
        "threads combined, so no finding does not mean a quiet machine; the report shows the lowest and the "
        "highest load.",
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
)


def find(runs: Runs) -> list[Finding]:
    """One finding per run that started under more load than an earlier run leaves, or had too few cores."""
    left = max((node_threads(row.record) for row in runs.rows), default=0)
    found = [_busy(row, left) for row in runs.rows] + [_shared(row) for row in runs.rows]
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


def _busy(row: Row, left: int) -> Finding | None:
    load = row.record.environment.load_average
    cores = row.record.environment.cores
    never_ran = row.record.status == "unsupported"
    if never_ran or load is None or not cores or load <= cores + left:
        return None
    return Finding(
        id="busy-machine",
        about=row.cell,
        # Without figures, so that findings of several cells merge into one sentence; the values hold them.
        text="the load average at the start exceeded cores and threads of the largest run combined: other "
        "work, or processes of an earlier run",
        values={"load_average": load, "cores": cores, "threads_of_largest_run": left},
    )
