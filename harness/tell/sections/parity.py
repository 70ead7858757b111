"""Parity levels with their limits, loss curves, and what a library that runs the loop would do alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from harness.backends.presets import LIBRARY_ALONE
from harness.judge.agreement.parity import (
    BAND_FACTOR,
    BIAS_FACTOR,
    CUT_BAND,
    TIGHT_FACTOR,
    UNMEASURED_FACTOR,
)
from harness.judge.comparison import Comparison
from harness.judge.quantities import loss_unit
from harness.judge.run_conditions import is_deterministic
from harness.judge.wording import CellName, listed, name_cells
from harness.record.workload import depends_on_split
from harness.tell.document import Column, Folded, Heading, Items, Section, Table
from harness.tell.formats import number, scientific
from harness.tell.pictures.plots import loss_picture
from harness.tell.tables import (
    LABELS,
    PARITY_ALSO,
    PARITY_WORDS,
    blocks_of,
    prose,
    section,
    table,
    table_columns,
    with_job,
)

MEASURES = (
    ("loss", "loss"), ("norm", "gradient norm"), ("update", "distance moved"), ("weights", "final weights"),
)  # fmt: skip


def levels_section(comparison: Comparison) -> Section | None:
    """None where no run was judged."""
    noises = comparison.noises
    if not noises:
        return None
    levels = [(job_id, noise, level) for job_id, noise in noises.items() for level in noise.levels]
    labels = [label for _, _, level in levels for label in level.repetitions]
    further = [text for option, text in PARITY_ALSO.items() if any(option in label for label in labels)]
    has_band, has_cut = (
        any(getattr(noise, name) is not None for noise in noises.values()) for name in ("band", "cut_band")
    )
    factors = {"tight": TIGHT_FACTOR, "band": BAND_FACTOR, "unmeasured": UNMEASURED_FACTOR}
    shown = {name: f"{factor:g}" for name, factor in factors.items()}
    element = prose("parity_element") if has_band else ""
    cut = prose("parity_cut", cut_band=CUT_BAND) if has_cut else ""
    found = [prose("parity_found", also="".join(further), cut=cut, element=element, **shown)]
    if any(depends_on_split(row.reference.record) for row in comparison.rows if row.reference is not None):
        found.append(prose("parity_at_once"))
    if any(noise.norms for noise in noises.values()):
        found.append(prose("parity_mean", tight=shown["tight"], bias=f"{BIAS_FACTOR:g}"))
    coarse = {
        str(group.rows[0].cell): group.limits.loss
        for group in comparison.groups
        if group.limits is not None and group.is_on_grid
    }
    if coarse:
        allowed = listed(sorted({scientific(limit) for limit in coarse.values()}))
        found.append(prose("parity_grid", cells=listed(list(coarse)), band=shown["band"], limits=allowed))
    several = len(noises) > 1
    limits = [
        [*([job_id] if several else []), level.name, title, seen, level.factor, allowed,
         "measurement" if is_measured else "lower bound"]
        for job_id, noise, level in levels
        for name, title in MEASURES
        for seen in [getattr(level.seen, name)]
        for allowed in [getattr(noise.of_level(level.name), name, None)]
        for is_measured in [seen is not None and allowed is not None and level.factor * seen >= allowed]
    ]  # fmt: skip
    sources = []
    for job_id, _, level in levels:
        by = f"measured by {listed(level.repetitions)}; lower bound: {level.rounding} rounding"
        source = by if level.repetitions else prose("parity_assumed", limits=level.assumed)
        sources.append(f"{f'job {job_id}, ' if several else ''}{level.name}: {source}.")
    # Which run shows the parity of those whose kernels add in any order.
    kernels: dict[str, None] = {}
    for row in comparison.rows:
        run = comparison.parity_run(row)
        if run is not None and not is_deterministic(row.record):
            own = run == row.record.run_id
            kernels[f"{row.cell}: {'its own losses, no other run' if own else run}"] = None
    spreads = comparison.repeat_spreads
    unit = min((loss_unit(row.record) for row in comparison.rows), key=len, default="")
    return section(
        "levels", "Parity levels",
        prose("parity_judged"),
        Items([(level, f"{of['means']}.") for level, of in PARITY_WORDS.items()]),
        " ".join(found),
        table("parity_levels", limits, with_job(table_columns("parity_limits"), several)),
        Items(sources),
        Folded("Difference of each run from the reference", [_distances(comparison)]),
        *(blocks_of(prose("parity_kernels"), Items(list(kernels))) if kernels else []),
        Folded(prose("parity_repeats"), [Items(_spreads(spreads, unit))]) if spreads else None,
    )  # fmt: skip


def _distances(comparison: Comparison) -> Table:
    """Runs of a cell with equal differences share a line."""
    columns = with_job(table_columns("parity_distances"), len(comparison.by_job) > 1)
    keys = [column.key for column in columns]
    before = keys.index("runs")
    keys.remove("runs")
    lines = Counter(tuple(row.figures[key] for key in keys) for row in comparison.rows)
    body = [[*line[:before], runs, *line[before:]] for line, runs in lines.items()]
    return Table(key="parity_distances", columns=columns, rows=body)


def _spreads(spreads: Mapping[str, float | None], unit: str) -> list[str]:
    """A line for each cell whose repeats differ or cannot be compared, and one for all the others."""
    lines = [
        f"{cell}: {scientific(value)} {unit}".rstrip()
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
    picture = loss_picture(comparison)
    if picture is None:
        return None
    steps = sorted({part.step for row in comparison.rows for part in row.record.eval})
    body = []
    for row in comparison.rows:
        losses = {part.step: part.loss for part in row.record.eval}
        if losses:
            body.append([*row.cell, row.record.repeat, *(losses.get(step) for step in steps)])
    columns = [Column(f"loss_after_step_{step}", f"after step {step}", number) for step in steps]
    held_out = table("held_out_loss", body, (*LABELS, Column("repeat", "repeat"), *columns))
    heading = Heading("Loss on held-out samples (nats per token)") if held_out else None
    return section("loss", "Loss", picture, heading, held_out)


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
    alone = table("library_alone", body, "trainer")
    return section("library_alone", "What Trainer does alone", prose("trainer"), alone)
