"""Prints model states of runs, measured and in closed form; docs/memory.md shows a table on 4 ranks.

harness compare --config configs/memory-bloom.yaml --runs runs/memory-bloom
harness compare --config configs/memory-llama.yaml --runs runs/memory-llama
python benchmarks/memory_table.py runs/memory-bloom runs/memory-llama
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from harness.forms.terms import STATE_KINDS
from harness.judge import quantities
from harness.judge.quantities import RankStates, largest, rank_states, textbook
from harness.record import Record
from harness.record.store import read_runs

SHARED_KINDS = ("optimizer", "gradients", "weights")
"""In the order in which the stages of ZeRO shard them."""
HEADERS = (
    "backend", "ranks", *STATE_KINDS, "measured", "expected", "difference",
    "beyond its share", "textbook", "allocator peak",
)  # fmt: skip


def main(folders: list[str]) -> None:
    """Print a heading and two tables per folder of runs."""
    for folder in folders:
        runs, problems = read_runs([Path(folder)])
        for problem in problems:
            print(problem, file=sys.stderr)
        records = [record for _, record in runs if rank_states(record)]
        print(f"### {_title(records[0])}\n")
        print(_shares_table(records), end="\n\n")
        print(_states_table(records), end="\n\n")


def _title(record: Record) -> str:
    model = record.model
    assert model is not None
    tied = "tied" if model.tied_parameters else "untied"
    return f"{model.architecture}, {tied}, {model.parameters:,} parameters"


def _shares_table(records: Sequence[Record]) -> str:
    """One line per backend: bytes of each kind on every number of ranks."""
    held: dict[str, dict[int, dict[str, int]]] = {}
    for record in records:
        held.setdefault(record.backend.label, {})[record.world.world_size] = _shares(record)
    sizes = sorted({size for by_size in held.values() for size in by_size})
    headers = ["backend"]
    for kind in SHARED_KINDS:
        headers += [f"{kind}, {size} rank{'s' if size > 1 else ''}" for size in sizes] + ["reduction"]
    lines = []
    for label, by_size in sorted(held.items()):
        if len(by_size) < len(sizes):
            continue  # the reference on one process
        line: list[object] = [label]
        for kind in SHARED_KINDS:
            shares = [by_size[size][kind] for size in sizes]
            line += [*shares, shares[0] / shares[-1]]
        lines.append(line)
    return tabulate(lines, headers=headers, tablefmt="github", intfmt=",", floatfmt=".2f")


def _shares(record: Record) -> dict[str, int]:
    """Bytes by kind on the rank with the most, without the terms beyond its share."""
    ranks = rank_states(record)
    return {kind: max(_share(states, kind) for states in ranks) for kind in SHARED_KINDS}


def _share(states: RankStates, kind: str) -> int:
    assert states.expected is not None
    extra = sum(term.bytes for term in states.expected.terms if term.kind == kind and term.extra)
    return states.measured.get(kind, 0) - extra


def _states_table(records: Sequence[Record]) -> str:
    """One line per run: the rank with the most, after a backward pass."""
    lines = [line for record in records if (line := _line(record)) is not None]
    lines.sort(key=lambda line: (line[1], line[0]))
    return tabulate(lines, headers=HEADERS, tablefmt="github", intfmt=",")


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
        max(quantities.Run.of(record).rank_peaks, default=None),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
