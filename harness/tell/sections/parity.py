"""Parity levels with their limits, loss curves, and what a library that runs the loop would do alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from harness.backends.trainer.alone import LIBRARY_ALONE
from harness.judge.agreement.parity import (
    BAND_FACTOR,
    CUT_BAND,
    TIGHT_FACTOR,
    UNMEASURED_FACTOR,
    Level,
    Noise,
    Tolerance,
)
from harness.judge.comparison import Comparison
from harness.judge.run_conditions import is_deterministic
from harness.judge.wording import CellName, listed, name_cells
from harness.record.workload import depends_on_split
from harness.tell.document import Block, Column, Folded, Heading, Items, Paragraph, Section, Table
from harness.tell.formats import number, scientific
from harness.tell.pictures.plots import loss_picture
from harness.tell.tables import LABELS, prose, table_columns

MEANINGS = (
    ("exact", "losses, gradient norms and final weights are equal bit for bit."),
    ("tight", "every measure is within its limit below: another order of summation explains the difference."),
    ("band", "beyond tight, but within what the low precision itself changes; not used in fp32."),
    ("diverged", "beyond: the run computes something else, or its loss or norm became NaN or infinite."),
    ("unjudged", "no comparison was possible; the reason is given below."),
)
ALSO = {
    "norm=fp32": " and the gradient norm summed in fp32",
    "backward=reordered": " and gradients of activations in another order",
}
"""By option of the reference's repetition."""
CUT = prose("parity_cut", cut_band=CUT_BAND)
AT_ONCE = " " + prose("parity_at_once")
MEASURES = (
    ("loss", "loss"), ("norm", "gradient norm"), ("update", "distance moved"), ("weights", "final weights"),
)  # fmt: skip
LIMITS = table_columns("parity_limits")


DISTANCES = table_columns("parity_distances")


def levels_section(comparison: Comparison) -> Section | None:
    """None where no run was judged."""
    noises = comparison.noises
    if not noises:
        return None
    labels = [label for noise in noises.values() for level in noise.levels for label in level.repetitions]
    further = [text for option, text in ALSO.items() if any(option in label for label in labels)]
    element = prose("parity_element") if any(noise.band is not None for noise in noises.values()) else ""
    cut = CUT if any(noise.cut_band is not None for noise in noises.values()) else ""
    factors = {"tight": TIGHT_FACTOR, "band": BAND_FACTOR, "unmeasured": UNMEASURED_FACTOR}
    shown = {name: f"{factor:g}" for name, factor in factors.items()}
    found = prose("parity_found", also="".join(further), cut=cut, element=element, **shown)
    if any(depends_on_split(row.reference.record) for row in comparison.rows if row.reference is not None):
        found += AT_ONCE
    if any(noise.norms for noise in noises.values()):
        found += " " + prose("parity_mean", tight=shown["tight"])
    blocks: list[Block] = [Paragraph(prose("parity_judged")), Items(MEANINGS), Paragraph(found)]
    blocks.append(_limits(noises))
    blocks.append(
        Items([_source(level, job_id, noises) for job_id, n in noises.items() for level in n.levels])
    )
    blocks.append(Folded("Difference of each run from the reference", [_distances(comparison)]))
    blocks += _kernels(comparison)
    spreads = comparison.repeat_spreads
    if spreads:
        title = "Difference between repeats of one backend: largest difference of a step's loss"
        blocks.append(Folded(title, [Items(_spreads(spreads))]))
    return Section("levels", "Parity levels", blocks)


def _kernels(comparison: Comparison) -> list[Block]:
    """Which run shows the parity of those whose kernels add in any order; nothing where none do."""
    found: dict[str, None] = {}
    for row in comparison.rows:
        run = comparison.parity_run(row)
        if run is not None and not is_deterministic(row.record):
            own = run == row.record.run_id
            found[f"{row.cell}: {'its own losses, no other run' if own else run}"] = None
    if not found:
        return []
    text = (
        "Kernels of these runs were not asked to be deterministic, so repeats may differ in the order of "
        "sums. What shows that they train as the reference does:"
    )
    return [Paragraph(text), Items(list(found))]


def _limits(noises: dict[str, Noise]) -> Table:
    several = len(noises) > 1
    body = [
        [*([job_id] if several else []), *line]
        for job_id, noise in noises.items()
        for level in noise.levels
        for line in _lines(level, noise.of_level(level.name))
    ]
    columns = (Column("job_id", "job", align="left"), *LIMITS) if several else LIMITS
    return Table(key="parity_levels", columns=columns, rows=body)


def _lines(level: Level, limits: Tolerance | None) -> list[list[Any]]:
    return [
        [level.name, title, seen, level.factor, allowed, _set_by(level, seen, allowed)]
        for name, title in MEASURES
        for seen, allowed in ((getattr(level.seen, name), getattr(limits, name, None)),)
    ]


def _set_by(level: Level, seen: float | None, allowed: float | None) -> str:
    """Whether the measurement or the lower bound decided a limit."""
    decided = seen is not None and allowed is not None and level.factor * seen >= allowed
    return "measurement" if decided else "lower bound"


def _source(level: Level, job_id: str, noises: dict[str, Noise]) -> str:
    where = f"job {job_id}, {level.name}" if len(noises) > 1 else level.name
    if not level.repetitions:
        return (
            f"{where}: not measured, since no other run of the reference shows it; the limits are "
            f"{level.assumed}."
        )
    return f"{where}: measured by {listed(level.repetitions)}; lower bound: {level.rounding} rounding."


def _distances(comparison: Comparison) -> Table:
    """Runs of a cell with equal differences share a line."""
    several = len(comparison.by_job) > 1
    columns = (Column("job_id", "job", align="left"), *DISTANCES) if several else DISTANCES
    keys = [column.key for column in columns if column.key != "runs"]
    lines = Counter(tuple(row.figures[key] for key in keys) for row in comparison.rows)
    before = [column.key for column in columns].index("runs")
    body = [[*line[:before], runs, *line[before:]] for line, runs in lines.items()]
    return Table(key="parity_distances", columns=columns, rows=body)


def _spreads(spreads: Mapping[str, float | None]) -> list[str]:
    """A line for each cell whose repeats differ or cannot be compared, and one for all the others."""
    lines = [
        f"{cell}: {scientific(value)} nats per token"
        if value is not None
        else f"{cell}: no loss to compare in one of the runs"
        for cell, value in spreads.items()
        if value != 0.0
    ]
    equal = len(spreads) - len(lines)
    if equal:
        cells = f"{'other ' if lines else ''}cell{'s' if equal > 1 else ''} with repeats"
        lines.append(f"{equal} {cells}: losses equal bit for bit")
    return lines


def loss_section(comparison: Comparison) -> Section | None:
    """None without any loss."""
    picture = loss_picture(comparison)
    if picture is None:
        return None
    blocks: list[Block] = [picture]
    held_out = _held_out(comparison)
    if held_out:
        blocks += [Heading("Loss on held-out samples (nats per token)"), held_out]
    return Section("loss", "Loss", blocks)


def _held_out(comparison: Comparison) -> Table | None:
    steps = sorted({part.step for row in comparison.rows for part in row.record.eval})
    if not steps:
        return None
    body = []
    for row in comparison.rows:
        losses = {part.step: part.loss for part in row.record.eval}
        if losses:
            label = [*row.cell, row.record.repeat]
            body.append([*label, *(losses.get(step) for step in steps)])
    columns = [*LABELS, Column("repeat", "repeat")]
    columns += [Column(f"loss_after_step_{step}", f"after step {step}", number) for step in steps]
    return Table(key="held_out_loss", columns=columns, rows=body)


TITLE = "What Trainer does alone"
COLUMNS = table_columns("trainer")
TEXT = prose("trainer")


def library_alone_section(comparison: Comparison) -> Section | None:
    """One line for each subject and value; None where no library ran the loop."""
    found: dict[str, dict[str, list[CellName]]] = {}
    for group in comparison.groups:
        effective = group.record.backend.effective
        subjects = effective.details.get(LIBRARY_ALONE, {}) if effective is not None else {}
        for subject, value in subjects.items():
            found.setdefault(subject, {}).setdefault(value, []).append(group.cell)
    body = [
        [subject, value, name_cells(cells)]
        for subject, values in found.items()
        for value, cells in values.items()
    ]
    if not body:
        return None
    return Section(
        "library_alone", TITLE, [Paragraph(TEXT), Table(key="library_alone", columns=COLUMNS, rows=body)]
    )
