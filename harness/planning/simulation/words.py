"""Simulated ranks as text and as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from harness.planning.simulation.comparison import BytesRow, CollectiveRow, SimulatedRow
from harness.tell.formats import NOT_AVAILABLE, megabytes

COLLECTIVES = (
    "phase", "collective", "dtype", "group", "ranks", "calls", "closed form", "payload MB", "closed form",
    "difference B", "sent MB", "leaves node MB",
)  # fmt: skip
MEMORY = ("memory", "simulated MB", "closed form", "difference B")
WHAT = {
    "fake": "tensors without data, of the shapes that torch's CPU kernels return",
    "real": "tensors with data and torch's CPU kernels",
}


def row_lines(row: SimulatedRow) -> list[str]:
    """One backend in one world: tables, then what was simulated and what was not."""
    run = row.asked.request.run
    title = (
        f"{run.backend}, rank {row.asked.request.rank} of {run.world_size} "
        f"({run.world_size // run.ranks_per_node} nodes of {run.ranks_per_node})"
    )
    if row.result.status != "ok":
        return [f"{title}: {status_of(row)}"]
    assert row.result.model is not None
    return [
        f"{title}: {row.result.model.architecture}, {row.result.model.parameters:,} parameters, micro-batch "
        f"{run.micro_batch_size}, accumulation {run.accumulation_steps}",
        "",
        _table(COLLECTIVES, [_collective(part) for part in row.collectives]),
        "",
        _table(MEMORY, [_bytes(part) for part in (*row.states, *_peaks(row))]),
        "",
        *simulation_lines(row),
    ]


def status_of(row: SimulatedRow) -> str:
    """'ok', or why there are no figures, with the library's versions."""
    result = row.result
    if result.status == "ok":
        return "ok"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"unsupported: {result.reason}" + (f" ({versions})" if versions else "")


def simulation_lines(row: SimulatedRow) -> list[str]:
    """What is simulated, what is not, and what was done otherwise than in a run."""
    result = row.result
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return [
        f"simulated: the adapter's own code ({versions}) with {WHAT[result.tensors]}, in "
        f"{result.seconds:.1f} s and {result.host_peak_bytes / 1e9:.1f} GB of this machine's memory",
        "not simulated: time, the transport's buffers, the data set, a GPU's kernels and allocator",
        *(f"done otherwise: {text}" for text in result.substitutions),
    ]


def as_json(rows: Sequence[SimulatedRow], model: str) -> dict[str, Any]:
    """The document of `harness simulate --json`; all per rank, in bytes, of one step."""
    return {"model": model, "rows": [_row(row) for row in rows]}


def _row(row: SimulatedRow) -> dict[str, Any]:
    run, result = row.asked.request.run, row.result
    return {
        "backend": run.backend,
        "world_size": run.world_size,
        "ranks_per_node": run.ranks_per_node,
        "rank": row.asked.request.rank,
        "micro_batch_size": run.micro_batch_size,
        "accumulation_steps": run.accumulation_steps,
        "status": result.status,
        "reason": result.reason,
        "parameters": result.model.parameters if result.model else None,
        "tensors": result.tensors,
        "versions": result.versions,
        "substitutions": result.substitutions,
        "collectives": [asdict(part) for part in row.collectives],
        "states": [asdict(part) for part in row.states],
        "peaks": [asdict(part) for part in row.peaks],
        "peak_bytes": row.peak_bytes,
        "moments": [part.model_dump(mode="json", exclude_none=True) for part in result.memory],
        "seconds": result.seconds,
    }


def _collective(row: CollectiveRow) -> list[str]:
    return [
        row.phase,
        row.op,
        row.dtype,
        row.role,
        str(row.group_size),
        str(row.calls),
        NOT_AVAILABLE if row.expected_calls is None else str(row.expected_calls),
        megabytes(row.payload_bytes),
        megabytes(row.expected_payload_bytes),
        _difference(row.payload_bytes, row.expected_payload_bytes),
        megabytes(row.sent_bytes),
        megabytes(row.node_sent_bytes),
    ]


def _peaks(row: SimulatedRow) -> list[BytesRow]:
    return [
        BytesRow(name=f"peak: {part.name}", bytes=part.bytes, expected_bytes=part.expected_bytes)
        for part in row.peaks
    ]


def _bytes(row: BytesRow) -> list[str]:
    return [
        row.name,
        megabytes(row.bytes),
        megabytes(row.expected_bytes),
        _difference(row.bytes, row.expected_bytes),
    ]


def _difference(simulated: int, expected: int | None) -> str:
    return (
        NOT_AVAILABLE if expected is None else f"{simulated - expected:+,}" if simulated != expected else "0"
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    left = 4 if len(headers) > len(MEMORY) else 1
    align = ["left"] * left + ["right"] * (len(headers) - left)
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=align) if rows else "none"
