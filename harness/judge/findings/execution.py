"""How ranks ran the model: passes and modes against the reference's, and what ranks should have alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.judge.findings.finding import Finding, of_cells
from harness.judge.rows import JudgedRun, Runs
from harness.judge.wording import a_few, both, counted, listed, numbered
from harness.record import Record

Passes = Mapping[int, tuple[int, int] | None]
DIRECTIONS = ("forward passes", "backward passes")
THE_MODEL = "the model itself"


def find_passes(runs: Runs) -> list[Finding]:
    """One finding per cell: the first step in which a rank makes more or fewer than its micro-steps take."""
    return of_cells(runs, _passes)


def _passes(row: JudgedRun) -> Finding | None:
    record = row.record
    if row.reference is None or record.world.mesh.size("pipeline") > 1:
        return None
    each = per_micro_step(row.reference.record)
    if each is None:
        return None
    for step in record.steps:
        made = {part.rank: pair for part in record.ranks if (pair := _at(part.passes, step.step)) is not None}
        for which, name in enumerate(DIRECTIONS):
            due = each[which] * record.world.accumulation_steps
            other = {rank: pair[which] for rank, pair in made.items() if pair[which] != due}
            if other:
                return Finding(
                    id="passes-differ",
                    about=row.cell,
                    text=f"{_made(other, name)} in step {step.step}, {due} {'is' if due == 1 else 'are'} "
                    f"due: {counted(record.world.accumulation_steps, 'micro-step')}, each with {each[which]} "
                    "in the reference",
                    values={"step": step.step, "passes": name, "due": due, "made": other},
                )
    return None


def _made(passes: Mapping[int, int], name: str) -> str:
    """'rank 1 makes 3 forward passes'; of several numbers that of the first rank."""
    first = next(iter(passes.values()))
    ranks = [rank for rank, count in passes.items() if count == first]
    name = name if first != 1 else name.removesuffix("es")
    return f"{numbered('rank', ranks)} make{'s' if len(ranks) == 1 else ''} {first} {name}"


def per_micro_step(reference: Record) -> tuple[int, int] | None:
    """Forward and backward passes of one micro-step; None: not known, or not the same in all of them."""
    steps, size = [step.step for step in reference.steps], reference.world.accumulation_steps
    found = {_at(part.passes, step) for part in reference.ranks for step in steps}
    made = found.pop() if len(found) == 1 else None
    if made is None or any(count % size for count in made):
        return None
    return made[0] // size, made[1] // size


def _at(passes: Passes, step: int) -> tuple[int, int] | None:
    """What holds in a step."""
    begun = [first for first in passes if first <= step]
    return passes[max(begun)] if begun else None


def find_modes(runs: Runs) -> list[Finding]:
    """One finding per run and mode that a layer has otherwise than in the reference."""
    return [finding for row in runs.rows for finding in _modes(row)]


MODES = {
    "evaluating_in_training": "in evaluation mode in training passes",
    "training_in_evaluation": "in training mode in evaluation passes",
}


def _modes(row: JudgedRun) -> Iterator[Finding]:
    seen, expected = row.record.observed, row.reference.record.observed if row.reference else None
    if seen is None or expected is None or row.record.world.mesh.size("pipeline") > 1:
        return
    for field, words in MODES.items():
        mine, other = getattr(seen, field), getattr(expected, field)
        if mine is None or other is None or mine == other:
            continue
        more, fewer = [sorted(set(a) - set(b)) for a, b in ((mine, other), (other, mine))]
        text = f"{_layers(more or fewer)} {words}" + ("" if more else " in the reference alone")
        yield Finding(
            id="mode-differs",
            about=row.cell,
            text=text,
            values={"field": field, "reference": other, "given": mine},
        )


def _layers(names: Sequence[str]) -> str:
    """'layer drop is', 'layers drop, norm and 3 more are'; the whole model has no name."""
    shown = listed([name or THE_MODEL for name in names], 3)
    return f"layer {shown} is" if len(names) == 1 else f"layers {shown} are"


def find_buffers(runs: Runs) -> list[Finding]:
    """One finding per cell: buffers that training moves in the reference and not here."""
    return of_cells(runs, _buffers)


def _buffers(row: JudgedRun) -> Finding | None:
    seen, expected = row.record.observed, row.reference.record.observed if row.reference else None
    if seen is None or expected is None or None in (seen.still_buffers, expected.still_buffers):
        return None
    moved = expected.buffers.keys() - set(expected.still_buffers or ())
    still = sorted(moved & set(seen.still_buffers or ()))
    if not still:
        return None
    return Finding(
        id="buffers-not-updated",
        about=row.cell,
        text=f"{'buffer' if len(still) == 1 else 'buffers'} {listed(still, 3)} kept the values of before the "
        "training, which changes them in the reference",
        values={"buffers": still},
    )


def find_unlike_ranks(runs: Runs) -> list[Finding]:
    """One finding per cell and group of ranks that differ from rank 0 in the same."""
    return [finding for row in runs.rows for finding in _unlike_ranks(row)]


MOST_SHOWN = 3


def _named(value: Any) -> Any:
    """The whole model has no name among its layers."""
    return [one or THE_MODEL for one in value] if isinstance(value, list) else value


def _unlike_ranks(row: JudgedRun) -> Iterator[Finding]:
    groups: list[tuple[dict[str, list[Any]], list[int]]] = []
    for part in row.record.ranks if row.record.status in ("ok", "diverged") else ():
        alike = next((ranks for unlike, ranks in groups if unlike == part.otherwise), None)
        if alike is not None:
            alike.append(part.rank)
        elif part.otherwise:
            groups.append((part.otherwise, [part.rank]))
    for unlike, ranks in groups:
        said = [
            f"{name} {given} against {first}"
            for name, pair in unlike.items()
            for given, first in (both(*map(_named, pair)),)
        ]
        yield Finding(
            id="ranks-differ",
            about=row.cell,
            text=f"{numbered('rank', ranks)} {'differs' if len(ranks) == 1 else 'differ'} from rank 0: "
            + a_few(said, MOST_SHOWN, "; "),
            values={"ranks": ranks, "otherwise": unlike},
        )
