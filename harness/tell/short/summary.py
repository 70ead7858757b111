"""The results in at most eight columns, relative to DDP on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison, strong_scaling, weak_scaling
from harness.judge.facts import SENT, SPEED, STEP
from harness.judge.quantities import unjudged_amounts
from harness.judge.rows import BASE, CellRuns, job_marks
from harness.judge.run_conditions import is_deterministic
from harness.judge.wording import CellName, counted, ranks
from harness.tell.document import Align, Block, Column, Heading, Line, Section, Shown, Table
from harness.tell.formats import NOT_AVAILABLE, dash, percent, times
from harness.tell.short.comparison_scope import bytes_frontier, comparison_scope, peak
from harness.tell.short.words import unwrapped
from harness.tell.tables import (
    LABELS,
    LEGEND,
    WITHOUT_FORM,
    WITHOUT_FORM_MEANS,
    figure_column,
    ratio_cell,
    ratio_column,
    shown_ratio,
)

MOST_ROWS = 16
"""Beyond these only cells that the verdict compares are shown."""
MANY_TIMES = 10
"""A ratio from which it is written as a multiple: nobody reads 5293 %."""
WITHIN_ROUNDS = (
    "Machines drift: take these ratios, not quotients of tokens/s, which are medians over all runs."
)
Read = Callable[[CellRuns], float | None]


@dataclass(frozen=True)
class _Figure:
    """A column of the summary; a ratio is shown next to the figure where there is a base."""

    key: str
    title: str
    read: Read
    show: Callable[[Any], str]
    is_ratio: bool = False
    align: Align = "right"


def _median(key: str) -> Read:
    return lambda group: group.median(key)


def _figure(key: str, read: Read | None = None) -> _Figure:
    column = figure_column(key)
    return _Figure(key, column.title, read or _largest(key), column.show)


def _largest(key: str) -> Read:
    return lambda group: group.figures[key]


def _share(value: float | None) -> str:
    """'91 %', '53 x'."""
    return percent(value) if value is None or value < MANY_TIMES else f"{value:,.0f} x"


def _of_base(key: str, title: str, read: Read) -> _Figure:
    return _Figure(f"{key}_of_{BASE}", f"{title} / {BASE}", read, _share, True)


SPEED_RATIO = _Figure("speed_ratio", "", _median(SPEED), percent)
SPEED_UP = _Figure("speed_up", "speed-up", _median(SPEED), percent)
PEAK_RATIO = _of_base("peak_bytes", "peak", peak)
STATES_RATIO = _of_base("model_state_bytes", "states", _median("model_state_bytes"))
SENT_RATIO = _of_base(SENT, "sent", _median(SENT))
PEAK, STATES, BYTES = _figure("peak_bytes", peak), _figure("model_state_bytes"), _figure(SENT)
FIRST_BEYOND = replace(_figure("first_divergent_step"), show=dash)
PARITY = _Figure("parity", "parity", lambda group: None, str, align="left")
AMOUNTS = (PEAK, STATES, BYTES)
"""What closed forms judge."""
FIGURES: dict[ReportFocus, tuple[_Figure, ...]] = {
    "all": (STATES, BYTES, SENT_RATIO, PARITY, PEAK, PEAK_RATIO, SPEED_RATIO),
    "speed": (SPEED_RATIO, SENT_RATIO, _figure(SPEED), _figure("step_seconds"), BYTES, PEAK, PARITY),
    "memory": (PEAK_RATIO, STATES_RATIO, PEAK, STATES, _figure("expected_model_state_bytes"), PARITY),
    "footprint": (STATES, STATES_RATIO, BYTES, SENT_RATIO, PARITY, PEAK, PEAK_RATIO),
    "parity": (
        _figure("max_loss_difference"), _figure("max_grad_norm_difference"),
        _figure("final_weights_difference"), FIRST_BEYOND, PARITY,
    ),
    "scaling": (SPEED_UP, SPEED_RATIO, _figure(SPEED), _figure("step_seconds"), BYTES, PEAK, PARITY),
}  # fmt: skip
"""What the question asks for leads; of all, what carries over to other machines."""


def summary_section(
    comparison: Comparison, question: ReportFocus, most_rows: int = MOST_ROWS
) -> Section | None:
    """A table for each number of ranks, and for each job if there are several; None without runs."""
    groups = summary_cells(comparison, most_rows)
    if not groups:
        return None
    members_of: dict[tuple[int, str], list[CellRuns]] = {}
    for group in groups:
        members_of.setdefault((group.world_size, group.record.job_id), []).append(group)
    named = comparison.comparable.groups
    several = len({group.world_size for group in named if not group.is_reference}) > 1
    marks = job_marks(groups) if len(members_of) > len({size for size, _ in members_of}) else {}
    blocks: list[Block] = []
    for (size, job), members in sorted(members_of.items(), key=lambda item: item[0][0]):
        heading = f"{ranks(size)}{marks.get(job, '')}"
        blocks += [Heading(heading)] if several or marks else []
        key = f"summary_{size}{f'_{job}' if marks else ''}"
        blocks.append(_table(key, comparison, members, FIGURES[question]))
    left = len([group for group in comparison.groups if not group.is_reference]) - len(groups)
    note = _note([block for block in blocks if isinstance(block, Table)], left)
    note = note or "Every figure of every cell:"
    return Section("summary", "Results", [*blocks, Line(note, details="results")])


def summary_cells(comparison: Comparison, most: int) -> list[CellRuns]:
    """All cells but the reference; of too many those where the verdict compares, the telling ones first.

    Telling are DDP, cells that diverged, and those that no other beats in bytes.
    """
    groups = comparison.comparable.groups
    groups = _without_proofs([group for group in groups if not group.is_reference] or groups)
    where = comparison_scope(comparison)
    if len(groups) <= most or where is None:
        return groups[:most]
    labels = {group.label: group for group in where.groups}
    here = [
        group
        for group in groups
        if group.place == where.place and not _repeats(group, labels.get(unwrapped(group.label)))
    ]
    if len(here) <= most:
        return here
    telling = {
        *(g.label for g in here if g.backend == BASE or g.parity == "diverged"),
        *(g.label for g in bytes_frontier(where)),
    }
    chosen = sorted(here, key=lambda group: group.label not in telling)[:most]
    return [group for group in here if group in chosen]


def _without_proofs(groups: Sequence[CellRuns]) -> list[CellRuns]:
    """Without those that only show the parity of cells which are timed with the kernels that jobs use."""

    def cell(group: CellRuns) -> tuple[str, str, int]:
        return group.record.job_id, group.backend, group.world_size

    timed = {cell(g) for g in groups if g.step_seconds and not is_deterministic(g.record)}
    return [g for g in groups if not is_deterministic(g.record) or cell(g) not in timed]


def _repeats(group: CellRuns, native: CellRuns | None) -> bool:
    """Whether a cell is another one, wrapped, and shows the same figures but for time."""
    if native is None or native is group or group.parity != native.parity:
        return False
    return all(f.show(f.read(group)) == f.show(f.read(native)) for f in AMOUNTS)


def _table(key: str, comparison: Comparison, groups: Sequence[CellRuns], wanted: Sequence[_Figure]) -> Table:
    bases = {group.place: group for group in groups if group.backend == BASE and group.has_result}
    orders = [comparison.comparable.rankings.get(group.place) for group in groups]
    speeds = ratio_column([order for order in orders if order])
    figures = [f for f in wanted if bases or not f.is_ratio]
    title, scaled = _scaled(comparison) if SPEED_UP in figures else ("", {})
    others = {SPEED_RATIO: speeds, SPEED_UP: Column("speed_up", title)}
    columns = [
        LABELS[0],
        replace(LABELS[1], only_values=True),
        *(
            others.get(f) or Column(f.key, f.title, f.show, "left" if f is PARITY else "right")
            for f in figures
        ),
    ]

    def value(group: CellRuns, figure: _Figure) -> Any:
        if figure is SPEED_UP:
            return scaled.get(group.cell)
        return _value(comparison, group, figure, bases.get(group.place))

    rows = [[*group.cell, *(value(group, figure) for figure in figures)] for group in groups]
    return Table(key=key, columns=columns, rows=rows)


def _scaled(comparison: Comparison) -> tuple[str, dict[CellName, Shown]]:
    """Title of the column of scaling, and each cell's figure: weak scaling where there is no strong."""
    strong = strong_scaling(comparison)
    curves, show = (strong, times) if strong else (weak_scaling(comparison), percent)
    points = {point.group.cell: point for curve in curves for point in curve}
    return "speed-up" if strong else "efficiency", {
        cell: shown_ratio(point.ratio, show) or Shown(point.speed_up, show(point.speed_up))
        for cell, point in points.items()
    }


def _value(comparison: Comparison, group: CellRuns, figure: _Figure, base: CellRuns | None) -> Any:
    if figure is SPEED_RATIO:
        return ratio_cell(comparison.comparable.rankings.get(group.place), group.label)
    if figure is PARITY:
        return _state(group)
    is_other_work = group.parity == "diverged" and figure.key in (SPEED, STEP)
    value = figure.read(group) if group.has_result and not is_other_work else None
    if not figure.is_ratio:
        has_no_form = value is not None and figure in AMOUNTS and unjudged_amounts(group.record)
        return Shown(value, f"{figure.show(value)}{WITHOUT_FORM}") if has_no_form else value
    divisor = figure.read(base) if base is not None else None
    return value / divisor if value is not None and divisor else None


def _state(group: CellRuns) -> str:
    """Its parity, and how runs without a result ended."""
    if not group.has_result:
        return group.status
    return group.parity if group.succeeded else f"{group.parity} ({group.status})"


def _note(tables: Sequence[Table], left: int) -> str:
    """What the ratios and marks in the tables mean, and how many cells are not in them."""
    texts = [text for table in tables for row in table.texts() for text in row]
    keys = {column.key: column.title for table in tables for column in table.columns}
    notes = {
        f"Ratios are to {BASE} on the same ranks.": any(key.endswith(f"_of_{BASE}") for key in keys),
        f"{NOT_AVAILABLE}: not measured or not comparable.": NOT_AVAILABLE in texts,
        f"speed: {LEGEND}.": "speed_ratio" in keys,
        f"{keys.get('speed_up')}: likewise, to the fewest ranks.": "speed_up" in keys,
        WITHIN_ROUNDS: {"speed_ratio", SPEED} <= keys.keys(),
        f"{WITHOUT_FORM}: {WITHOUT_FORM_MEANS}.": any(text.endswith(WITHOUT_FORM) for text in texts),
        f"{counted(left, 'more row')}.": left > 0,
    }
    return " ".join(note for note, applies in notes.items() if applies)
