"""Timed windows with different instrumentation."""

from __future__ import annotations

from typing import Any

from harness.judge import measures
from harness.judge.cell import Cell
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.record import Record

# Sections of DeepSpeed's configuration that synchronise or record within a step when they are on.
LIBRARY_LOGGERS = ("comms_logger", "flops_profiler", "wall_clock_breakdown", "dump_state")
SLOW_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT")
OFF = ("", "0", "false", "off", "version", "warn")


def find(runs: Runs) -> list[Finding]:
    """One finding per job whose timed windows differ in instrumentation."""
    jobs: dict[str, dict[Cell, tuple[str, ...]]] = {}
    for row in runs.rows:
        if measures.timed_steps(row.record):
            cell = row.cell
            found = jobs.setdefault(row.record.job_id, {})
            # Of repeats, the one with the most counts.
            found[cell] = max(found.get(cell, ()), instrumentation(row.record), key=len)
    return [
        Finding(
            id="instrumented-timing",
            about=tuple(sorted({cell.label for cell, used in cells.items() if used})),
            text="the timed steps were instrumented differently: "
            + "; ".join(f"{cell.key}: {', '.join(used)}" for cell, used in cells.items() if used),
            values={cell.key: list(used) for cell, used in cells.items()},
        )
        for cells in jobs.values()
        if len(set(cells.values())) > 1
    ]


def instrumentation(record: Record) -> tuple[str, ...]:
    """Instrumentation of the timed steps of a run: probes, loggers of the library, variables."""
    found = {probe for rank in record.ranks for probe in rank.timed_probes}
    config = record.backend.native_config or {}
    found |= {name for name in LIBRARY_LOGGERS if _is_on(config.get(name))}
    variables = record.environment.variables
    found |= {
        f"{name}={variables[name]}"
        for name in SLOW_VARIABLES
        if str(variables.get(name, "")).lower() not in OFF
    }
    return tuple(sorted(found))


def _is_on(value: Any) -> bool:
    return bool(value.get("enabled") if isinstance(value, dict) else value)
