"""How ranks ran the model: passes, modes, buffers, what ranks should have alike; runs that are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from harness.bounds import MOST_REPEATS
from harness.judge.findings.finding import Finding, Rules, found
from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import CellName, both
from harness.record import Record

Passes = Mapping[int, tuple[int, int] | None]
DIRECTIONS = ("forward passes", "backward passes")


def layer_names(names: Sequence[str]) -> list[str]:
    """The whole model has no name among its layers."""
    return [name or "the model itself" for name in names]


def passes(row: JudgedRun) -> Iterator[Finding]:
    """The first step in which a rank makes more or fewer passes than its micro-steps take."""
    record = row.record
    if row.reference is None or record.world.mesh.size("pipeline") > 1:
        return
    each = per_micro_step(row.reference.record)
    for step in record.steps if each is not None else ():
        made = {part.rank: pair for part in record.ranks if (pair := _at(part.passes, step.step)) is not None}
        for which, name in enumerate(DIRECTIONS):
            micro_steps, of_one = record.world.accumulation_steps, (each or (0, 0))[which]
            other = {rank: pair[which] for rank, pair in made.items() if pair[which] != of_one * micro_steps}
            if other:
                first = next(iter(other.values()))
                yield found(
                    "passes-differ", row.cell,
                    {"step": step.step, "passes": name, "due": of_one * micro_steps, "made": other},
                    first=first, ranks=[rank for rank, count in other.items() if count == first],
                    micro_steps=micro_steps, each=of_one,
                )  # fmt: skip
                return


def per_micro_step(reference: Record) -> tuple[int, int] | None:
    """Forward and backward passes of one micro-step; None: not known, or not the same in all of them."""
    steps, size = [step.step for step in reference.steps], reference.world.accumulation_steps
    counts = {_at(part.passes, step) for part in reference.ranks for step in steps}
    made = counts.pop() if len(counts) == 1 else None
    if made is None or any(count % size for count in made):
        return None
    return made[0] // size, made[1] // size


def _at(passes: Passes, step: int) -> tuple[int, int] | None:
    begun = [first for first in passes if first <= step]
    return passes[max(begun)] if begun else None


def modes(row: JudgedRun) -> Iterator[Finding]:
    seen, expected = row.record.observed, row.reference.record.observed if row.reference else None
    if seen is None or expected is None or row.record.world.mesh.size("pipeline") > 1:
        return
    for field in ("evaluating_in_training", "training_in_evaluation"):
        mine, other = getattr(seen, field), getattr(expected, field)
        if mine is None or other is None or mine == other:
            continue
        more, fewer = [layer_names(sorted(set(a) - set(b))) for a, b in ((mine, other), (other, mine))]
        values = {"field": field, "reference": other, "given": mine}
        yield found("mode-differs", row.cell, values, "layers", more=more, fewer=fewer)


def buffers(row: JudgedRun) -> Iterator[Finding]:
    """Buffers that training moves in the reference and not here."""
    seen, expected = row.record.observed, row.reference.record.observed if row.reference else None
    if seen is None or expected is None or None in (seen.still_buffers, expected.still_buffers):
        return
    moved = expected.buffers.keys() - set(expected.still_buffers or ())
    if still := sorted(moved & set(seen.still_buffers or ())):
        yield found("buffers-not-updated", row.cell, {"buffers": still})


def unlike_ranks(row: JudgedRun) -> Iterator[Finding]:
    """One finding per group of ranks that differ from rank 0 in the same."""
    groups: list[tuple[dict[str, list[Any]], list[int]]] = []
    for part in row.record.ranks if row.record.status in ("ok", "diverged") else ():
        alike = next((ranks for unlike, ranks in groups if unlike == part.otherwise), None)
        if alike is not None:
            alike.append(part.rank)
        elif part.otherwise:
            groups.append((part.otherwise, [part.rank]))
    for unlike, ranks in groups:
        sides = {
            name: both(*(layer_names(value) if isinstance(value, list) else value for value in pair))
            for name, pair in unlike.items()
        }
        said = [f"{name} {given} against {first}" for name, (given, first) in sides.items()]
        yield found("ranks-differ", row.cell, {"ranks": ranks, "otherwise": unlike}, settings=said)


def tied_apart(row: JudgedRun) -> Iterator[Finding]:
    """A pipeline whose ends hold different copies of a weight."""
    record, effective = row.record, row.record.backend.effective
    shared = effective.details.get("tied_across_stages") if effective else None
    digests: dict[int, set[str]] = {}
    for rank in record.ranks if shared else ():
        if rank.final_digest is not None:
            digests.setdefault(record.world.mesh.data_rank(rank.rank), set()).add(rank.final_digest)
    if shared and any(len(of_pipeline) > 1 for of_pipeline in digests.values()):
        yield found("tied-weight-apart", row.cell, {"weights": list(shared)})


OPTION = "--repeats"


def completeness(runs: Runs) -> Iterator[Finding]:
    """Findings per cell with a gap, or with runs without a result, whatever machine its runs were made on.

    None of an unsupported one, or of one in which no run succeeded.
    """
    cells: dict[tuple[str, str, int], list[Record]] = {}
    rounds: dict[tuple[str, ...], int] = {}
    for row in runs.rows:
        record = row.record
        if record.status != "unsupported":
            cells.setdefault((record.job_id, row.backend, record.world.world_size), []).append(record)
            command = tuple(record.command)
            rounds[command] = max(rounds.get(command, 0), record.repeat + 1)
    for (_, backend, size), records in cells.items():
        cell = CellName(backend, size)
        # A command asked for so many runs as far as any of its cells is here: another that asks for fewer
        # takes over the first runs of all.
        asked = [min(_asked(record.command), rounds[tuple(record.command)]) for record in records]
        due = max(*asked, *(record.repeat + 1 for record in records))
        missing = sorted(set(range(min(due, MOST_REPEATS))) - {record.repeat for record in records})
        if missing:
            values: dict[str, Any] = {"missing": missing, "runs": min(due, MOST_REPEATS)}
            yield found("runs-missing", cell, values, "missing")
        known = {record.repeat for record in records if record.status == "ok"}
        ended = {r.repeat: r.status for r in records if r.repeat not in known and not r.was_interrupted}
        if known and ended and "diverged" not in ended.values():
            statuses = sorted(set(ended.values()))
            values = {"without_result": sorted(ended), "runs": due}
            yield found("runs-missing", cell, values, "without-result", statuses=statuses)


def _asked(command: Sequence[str]) -> int:
    """How many runs of each cell a command asked for; 0 where it does not say."""
    for word, following in zip(command, [*command[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option == OPTION:
            with suppress(ValueError):
                return int(value if equals else following)
    return 0


RULES = Rules(of_runs=(modes, unlike_ranks, tied_apart), of_cells=(passes, buffers), of_all=(completeness,))
