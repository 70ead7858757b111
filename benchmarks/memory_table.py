"""Model states of runs, measured and in closed form, as a markdown table: the one of docs/memory.md.

harness compare --config configs/memory.yaml --runs runs/memory
python benchmarks/memory_table.py runs/memory
"""

from __future__ import annotations

import sys
from pathlib import Path

from tabulate import tabulate

from harness.compare import measures
from harness.compare.states import largest, rank_states, textbook
from harness.record import Record
from harness.store import read_runs
from harness.theory.memory.terms import STATE_KINDS

HEADERS = (
    "backend", "ranks", *(f"{kind}" for kind in STATE_KINDS), "all, measured", "all, expected", "off",
    "of it padding, copies, counters", "textbook", "allocator's peak",
)  # fmt: skip


def main(folders: list[str]) -> None:
    """Print one line per run: bytes of the rank that holds most, after a backward pass."""
    runs, problems = read_runs(Path(folder) for folder in folders)
    for problem in problems:
        print(problem, file=sys.stderr)
    lines = [line for _, record in runs if (line := _line(record)) is not None]
    lines.sort(key=lambda line: (line[1], line[0]))
    print(tabulate(lines, headers=HEADERS, tablefmt="github", intfmt=","))


def _line(record: Record) -> list[object] | None:
    held = largest(rank_states(record))
    book = textbook(record)
    if held is None or held.expected is None or book is None:
        return None
    extra = sum(t.bytes for t in held.expected.terms if t.extra and t.kind in STATE_KINDS)
    total = held.expected.model_state_bytes
    return [
        record.backend.label,
        record.world.world_size,
        *(held.measured.get(kind, 0) for kind in STATE_KINDS),
        held.measured_bytes,
        total,
        held.measured_bytes - total,
        extra,
        round(sum(book.values())),
        max(measures.peak_bytes(record), default=None),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
