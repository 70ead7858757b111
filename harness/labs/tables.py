"""The hand-outs' tables of measured figures, with the columns, rows and units that they have there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.judge.findings.jobs import work_per_rank
from harness.judge.quantities import median_step
from harness.judge.rows import CellRuns
from harness.labs.definitions import LAYOUTS, Counted, Estimated, Figure, Lab, TableLayout
from harness.plan.answer import answers
from harness.plan.document import document
from harness.plan.models import load_model
from harness.plan.question import ask
from harness.record import OverlapPart, Record, StepPart
from harness.tell.formats import fitted, folded


def runtime_seconds(cell: CellRuns) -> float | None:
    """Mean timed step times the steps of the job: without set-up and evaluations."""
    step = cell.figures["step_seconds"]
    return None if step is None else step * len(cell.record.steps)


def mean_loss(steps: Sequence[StepPart]) -> float | None:
    """Mean over steps, as `train_loss` of Transformers' Trainer, in nats."""
    losses = [step.loss for step in steps if step.loss is not None]
    return sum(losses) / len(losses) if losses else None


def traced(cell: CellRuns) -> list[OverlapPart]:
    """Every traced step of every rank."""
    return [part for rank in cell.record.ranks for part in rank.overlap]


def steps_per_epoch(cell: CellRuns) -> int | None:
    data, batch = cell.record.data, cell.record.job.training.global_batch_size
    return data.training_samples // batch if data and batch else None


def evaluation_loss(cell: CellRuns, epoch: int) -> float | None:
    """Loss of the last evaluation up to the end of an epoch, counted from 1; None if none was in it."""
    each = steps_per_epoch(cell)
    if not each:
        return None
    found = [part for part in cell.record.eval if each * (epoch - 1) < part.step <= each * epoch]
    return found[-1].loss if found else None


def baseline(cells: Sequence[CellRuns]) -> CellRuns | None:
    """One process on the job of one rank: its batch is not that of more ranks."""
    alone = {c.record.job_id for c in cells if c.world_size == 1 and not c.is_reference}
    found = [c for c in cells if c.is_reference]
    return next((c for c in found if c.record.job_id in alone), found[0] if len(found) == 1 else None)


def cells(records: Sequence[Record]) -> list[CellRuns]:
    """The cells of a lab that ended well, by number of ranks."""
    found = [cell for cell in Comparison(records).groups if cell.record.status == "ok"]
    return sorted(found, key=lambda cell: cell.world_size)


def remarks(records: Sequence[Record], figures: Collection[Figure]) -> list[str]:
    """What must be known of these records to read these figures."""
    found, names = [], {figure.figure for figure in figures}
    timed = any(name.endswith(("seconds", "per_second")) for name in names)
    of_cpu = ["'GPU memory' is what torch allocates in host memory"] * ("peak_bytes" in names)
    of_cpu += ["speeds say nothing of GPUs"] * timed
    if of_cpu and any(record.world.device == "cpu" for record in records):
        found.append(f"CPU ranks: {'; '.join(of_cpu)}.")
    if timed and any(figure.factor or figure.figure in QUOTIENTS for figure in figures):
        found.append("Quotients: runs at different times.")
    for record in records:
        if record.status != "ok":
            reason = "; ".join(record.reasons) or (record.error.message if record.error else record.status)
            where = f"{record.backend.label} on {record.world.world_size}"
            found.append(f"{where}: {record.status}: {reason.splitlines()[0] if reason else ''}")
    return list(dict.fromkeys(found))


MISSING = "n/a"
GB = 1e9
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class LabTable:
    """One table; cells are texts, those of what was not measured n/a."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    """Why a column is n/a, and what a figure is where that cannot be guessed."""
    title: str = ""

    def markdown(self) -> str:
        """The table, and below it the notes."""
        text = tabulate(self.rows, headers=list(self.headers), tablefmt="github", disable_numparse=True)
        head = [f"**{self.title}**", ""] if self.title else []
        return "\n".join(
            [*head, text, *(f"\n- {note}" if n == 0 else f"- {note}" for n, note in enumerate(self.notes))]
        )

    def text(self) -> str:
        """The table and its notes for a terminal: no line is longer than it is wide."""
        head = [self.title, ""] if self.title else []
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return folded("\n".join([*head, fitted(self.rows, self.headers), *notes]))


def shown(value: float | None, digits: int = 2) -> str:
    """A figure; n/a for None."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def ratio(value: float | None, base: float | None) -> float | None:
    """Value over base; None if either is not known."""
    return None if value is None or not base else value / base


UNITS = {None: 1.0, "GB": GB, "MiB": MIB, "ms": 1e-3}


@dataclass(frozen=True, kw_only=True)
class LabRow:
    """A cell in a table."""

    name: str
    cell: CellRuns
    base: CellRuns
    """What factors are of: the first cell, of its strategy where the rows are curves."""

    ddp: CellRuns | None
    """On as many ranks and nodes."""

    is_alone: bool = False
    """Whether its strategy ran on this number of ranks only, and not on one."""

    def value(self, figure: Figure) -> Any:
        """A figure, or a text; None: not measured."""
        key = figure.figure
        if key == "name":
            return self.name
        if figure.epoch is not None:
            return evaluation_loss(self.cell, figure.epoch)
        return OWN[key](self) if key in OWN else self.cell.figures[key]

    def base_value(self, figure: Figure) -> Any:
        return None if self.is_alone else replace(self, cell=self.base).value(figure)


def text_of(figure: Figure | None, value: Callable[[Figure], Any], base: Callable[[Figure], Any]) -> str:
    """A figure of a line, or its factor to that of the base; n/a where it is not known."""
    if figure is None:
        return MISSING
    found = value(figure)
    if figure.factor is not None:
        found = ratio(*((found, base(figure)) if figure.factor == "over-base" else (base(figure), found)))
    return found if isinstance(found, str) else shown(ratio(found, UNITS[figure.unit]), figure.digits)


def _of_step(name: str) -> Callable[[LabRow], Any]:
    """Reader of a figure of the traced step of median duration."""
    return lambda row: getattr(median_step(found), name) if (found := traced(row.cell)) else None


def _effective(name: str, without: str | None = None) -> Callable[[LabRow], Any]:
    """What the backend read back; `without` where it has none."""
    return lambda row: getattr(row.cell.record.backend.effective, name, None) or without


def _efficiency(row: LabRow) -> float | None:
    work = ratio(_work(row), work_per_rank(row.base.record))
    times = ratio(runtime_seconds(row.base), runtime_seconds(row.cell))
    return None if work is None or times is None else 100 * work * times


def _work(row: LabRow) -> float | None:
    return work_per_rank(row.cell.record)


def _layers(row: LabRow) -> int | None:
    model = row.cell.record.model
    return model.geometry.layers if model and model.geometry else None


def _hidden(row: LabRow) -> float | None:
    """In per cent; None without communication."""
    step = median_step(found) if (found := traced(row.cell)) else None
    if step is None or not step.communication_seconds:
        return None
    return 100 * (1 - step.exposed_seconds / step.communication_seconds)


def _longest_wait(row: LabRow) -> str | None:
    waits = [wait for part in traced(row.cell) for wait in part.waits]
    wait = max(waits, key=lambda wait: wait.seconds, default=None)
    return f"{wait.name}, {wait.phase}" if wait else None


def _state_dtypes(row: LabRow) -> str | None:
    observed = row.cell.record.observed
    return ", ".join(observed.optimizer_state_dtypes) if observed else None


OWN: dict[str, Callable[[LabRow], Any]] = {
    "ranks": lambda row: str(row.cell.world_size),
    "nodes": lambda row: str(row.cell.record.world.nodes),
    "micro_batch_size": lambda row: str(row.cell.record.world.micro_batch_size),
    "runtime_seconds": lambda row: runtime_seconds(row.cell),
    "speed_up": lambda row: ratio(runtime_seconds(row.ddp), runtime_seconds(row.cell)) if row.ddp else None,
    "train_loss": lambda row: mean_loss(row.cell.record.steps),
    "last_epoch_loss": lambda row: mean_loss(row.cell.record.steps[-(steps_per_epoch(row.cell) or 1) :]),
    "steps_per_epoch": lambda row: steps_per_epoch(row.cell),
    "exact_match": lambda row: getattr(row.cell.record.answers, "exact_match", None),
    "f1": lambda row: getattr(row.cell.record.answers, "f1", None),
    "parameters": lambda row: getattr(row.cell.record.model, "parameters", None),
    "layers": _layers,
    "work": _work,
    "efficiency": _efficiency,
    "strategy": _effective("strategy"),
    "parameter_dtype": _effective("parameter_dtype"),
    "autocast_dtype": _effective("autocast_dtype", "none"),
    "master_dtype": _effective("master_dtype"),
    "gradient_dtype": _effective("gradient_dtype"),
    "reduce_dtype": _effective("reduce_dtype", "nothing"),
    "optimizer_state_dtypes": _state_dtypes,
    **{name: _of_step(name) for name in OverlapPart.model_fields if name.endswith("seconds")},
    "hidden": _hidden,
    "longest_wait": _longest_wait,
}
"""Figures that only hand-outs know, beside the metrics."""
QUOTIENTS = ("speed_up", "efficiency")


def _rows(kind: str, found: Sequence[CellRuns]) -> list[LabRow]:
    """The cells of a lab, named and in the order of a hand-out."""
    first, rest = baseline(found), [cell for cell in found if not cell.is_reference]
    match kind:
        case "setups":
            several = len({cell.label for cell in rest}) > 1
            named = [("Single Node, Single GPU", first)] if first else []
            named += [(_setup(cell, several), cell) for cell in rest]
        case "stages":
            named = [*([("Baseline", first)] if first else []), *((_stage(cell), cell) for cell in rest)]
        case "places":
            named = [(_place(cell) + " (baseline)" * (cell is rest[0]), cell) for cell in rest]
        case "curves":
            labels = dict.fromkeys(cell.label for cell in rest)
            named = [(label, cell) for label in labels for cell in rest if cell.label == label]
        case "read-back":
            known = [cell for cell in found if cell.record.backend.effective is not None]
            named = [(cell.label, cell) for cell in known]
        case _:
            named = [(cell.label, cell) for cell in (rest if kind == "strategies" else found)]
    bases = dict(reversed(named)) if kind == "curves" else {}
    names = [name for name, _ in named]
    ddp = {_place(cell): cell for cell in found if cell.label == "ddp"}
    return [
        LabRow(
            name=name,
            cell=cell,
            base=bases.get(name, named[0][1]),
            ddp=ddp.get(_place(cell)),
            is_alone=name in bases and names.count(name) == 1 and cell.record.world.world_size > 1,
        )
        for name, cell in named
    ]


def _setup(cell: CellRuns, several: bool) -> str:
    nodes = cell.record.world.nodes
    where = "Single Node" if nodes == 1 else f"{nodes} Nodes"
    gpus = "Single GPU" if cell.world_size == 1 else f"{cell.world_size} GPUs"
    name = cell.label if several else cell.record.backend.name
    return f"{where}, {gpus}" + (f", {name}" if several or cell.world_size == 1 else "")


def _stage(cell: CellRuns) -> str:
    name, _, options = cell.label.partition(":")
    stage = f"Stage {name.removeprefix('zero')}" if name.startswith("zero") else name
    where = ", offload" if "offload" in options else ""
    return f"{stage}{where}, {cell.world_size} GPU{'s' * (cell.world_size > 1)}"


def _place(cell: CellRuns) -> str:
    nodes = cell.record.world.nodes
    return f"{cell.world_size} GPU{'s' * (cell.world_size > 1)}, {nodes} Node{'s' * (nodes > 1)}"


def measured_table(layout: TableLayout, kind: str, records: Sequence[Record]) -> LabTable:
    """A table of a hand-out, filled in; remarks on the records stand below the untitled one."""
    rows = _rows(kind, cells(records))
    begun = (-(-len(row.cell.record.steps) // each) for row in rows if (each := steps_per_epoch(row.cell)))
    epochs = range(1, 1 + max(begun, default=0))
    columns: dict[str, Figure | None] = {}
    for title, figure in layout.columns.items():
        if figure is not None and "{epoch}" in title:
            columns |= {title.format(epoch=n): figure.model_copy(update={"epoch": n}) for n in epochs}
        else:
            columns[title] = figure
    given = [figure for figure in columns.values() if figure]
    notes = layout.notes if layout.title else [*layout.notes, *remarks(records, given)]
    headers, body = (
        [*columns],
        [[text_of(figure, row.value, row.base_value) for figure in columns.values()] for row in rows],
    )
    if layout.corner is not None:
        lines = [[title, *(values[n] for values in body)] for n, title in enumerate(headers)]
        headers, body = [layout.corner, *(row.name for row in rows)], lines
    return LabTable(headers=headers, rows=body, notes=notes, title=layout.title)


def estimated_lines(asked: Estimated, figures: Sequence[Figure | None]) -> list[list[str]]:
    """Predictions by number of ranks and strategy; factors are over the first strategy on the same ranks."""
    found = ask(
        load_model(asked.model), load_experiment(None, asked.settings), backends=asked.backends,
        world_sizes=asked.ranks, ranks_per_node=asked.ranks_per_node,
    )  # fmt: skip
    rows = [
        row | row["optimizer_parts"] | {"world_size": str(row["world_size"])}
        for row in document(answers(found))["rows"]
    ]
    first = {row["world_size"]: row for row in reversed(rows)}
    return [
        [
            text_of(figure, lambda f: row[f.figure], lambda f: first[row["world_size"]][f.figure])  # noqa: B023
            for figure in figures
        ]
        for row in rows
    ]


def counted_lines(counted: Counted, columns: int) -> list[list[str]]:
    """Bytes of the parameters of each model in each dtype, in binary units."""
    return [
        [name, dtype, *(_size(parameters * width) for width in widths), *[MISSING] * (columns - len(widths))]
        for name in counted.models
        for parameters in (load_model(name).parameters,)
        for dtype, widths in counted.dtypes.items()
    ]


def _size(count: float) -> str:
    return f"{count / MIB:,.2f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"


def fill(lab: Lab, records: Sequence[Record]) -> list[LabTable]:
    """The tables of a lab; one of arithmetic needs no records."""
    return [_filled(layout, records) for layout in LAYOUTS[lab.table]]


def _filled(layout: TableLayout, records: Sequence[Record]) -> LabTable:
    match layout.rows:
        case Estimated():
            body = estimated_lines(layout.rows, [*layout.columns.values()])
        case Counted():
            body = counted_lines(layout.rows, len(layout.columns) - 2)
        case kind:
            return measured_table(layout, kind, records)
    return LabTable(headers=[*layout.columns], rows=body, notes=layout.notes, title=layout.title)
