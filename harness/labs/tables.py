"""The hand-outs' tables of measured figures, with the columns, rows and units that they have there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tabulate import tabulate

from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.judge.findings.weak_scaling import work_per_rank
from harness.judge.repeats import Repeats
from harness.judge.speed import median_step
from harness.labs.catalogue import Lab, TableKind
from harness.plan.estimate import document, question
from harness.plan.estimate.row import estimate
from harness.plan.models import load_model
from harness.record import OverlapPart, Record
from harness.tell.narrow import fitted, folded

NO_LOSS: tuple[float, ...] = ()


@dataclass(frozen=True)
class Facts:
    """A cell of a lab: its repeats summed up as everywhere, and a few figures that only hand-outs know."""

    group: Repeats

    @property
    def record(self) -> Record:
        return self.group.record

    @property
    def ranks(self) -> int:
        return self.group.world_size

    @property
    def is_baseline(self) -> bool:
        """Whether it is one process without any strategy."""
        return self.group.is_reference

    def figure(self, key: str) -> float | None:
        """A metric of the cell by its key."""
        return self.figures[key]

    @cached_property
    def figures(self) -> dict[str, float | None]:
        return self.group.figures

    @property
    def runtime_seconds(self) -> float | None:
        """Mean timed step times the steps of the job: without set-up and evaluations."""
        step = self.figure("step_seconds")
        return None if step is None else step * len(self.record.steps)

    @property
    def train_loss(self) -> float | None:
        """Mean over all steps, as `train_loss` of Transformers' Trainer, in nats."""
        losses = [step.loss for step in self.record.steps if step.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def steps_per_epoch(self) -> int | None:
        batch = self.record.job.training.global_batch_size
        return self.record.data.training_samples // batch if self.record.data and batch else None

    def evaluation_loss(self, epoch: int) -> float | None:
        """Of the last evaluation up to the end of an epoch, counted from 1; None if none was in it."""
        each = self.steps_per_epoch
        if not each:
            return None
        found = [part for part in self.record.eval if each * (epoch - 1) < part.step <= each * epoch]
        return found[-1].loss if found else None

    @property
    def epochs(self) -> int:
        """Epochs that were begun."""
        each = self.steps_per_epoch
        return -(-len(self.record.steps) // each) if each else 0


def baseline(cells: Sequence[Facts]) -> Facts | None:
    """One process on the job of one rank: its batch is not that of more ranks."""
    alone = {c.record.job_id for c in cells if c.ranks == 1 and not c.is_baseline}
    found = [c for c in cells if c.is_baseline]
    return next((c for c in found if c.record.job_id in alone), found[0] if len(found) == 1 else None)


def cells(records: Sequence[Record]) -> list[Facts]:
    """The cells of a lab that ended well, by number of ranks."""
    groups = Comparison(records).groups
    return sorted(
        (Facts(group) for group in groups if group.record.status == "ok"), key=lambda cell: cell.ranks
    )


def strategies(found: Sequence[Facts]) -> list[Facts]:
    """The cells that are no reference."""
    return [cell for cell in found if not cell.is_baseline]


def on_cpu(records: Sequence[Record]) -> bool:
    """Whether what a hand-out calls GPU memory was host memory."""
    return any(record.world.device == "cpu" for record in records)


def remarks(records: Sequence[Record]) -> list[str]:
    """What holds for every table of these records."""
    found = []
    if on_cpu(records):
        found.append(
            "CPU ranks: 'GPU memory' is what torch allocates in host memory; speeds say nothing of GPUs."
        )
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
        """The same for a terminal: no line is longer than it is wide."""
        head = [self.title, ""] if self.title else []
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return folded("\n".join([*head, fitted(self.rows, self.headers), *notes]))


def shown(value: float | None, digits: int = 2) -> str:
    """A figure; n/a for None."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def ratio(value: float | None, base: float | None) -> float | None:
    """Value over base; None if either is not known."""
    return None if value is None or not base else value / base


def scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


NOT_POLLED = "memory is not polled: peaks are exact, so averages and modes over time are n/a"
NO_UTILISATION = "GPU utilization as `nvidia-smi` counts it is no measure of work; the report has model FLOPs"
ONE_CALLBACK = "there is one clock; W&B's default columns and the callback's would show the same figure"
RUNTIME = "Runtime: mean timed step times the steps, without set-up and evaluations"
Row = tuple[str, Facts]


def scaling_tables(records: Sequence[Record]) -> list[LabTable]:
    """KAUST `fsdp/bloom`: speed, runtime, their scale factors, loss and memory; then the evaluation."""
    found = cells(records)
    rows = _setups(found)
    base = rows[0][1] if rows else None
    speed = base.figure("samples_per_second") if base else None
    body = [
        [
            setup, str(cell.ranks), shown(cell.figure("samples_per_second")),
            shown(ratio(cell.figure("samples_per_second"), speed)),
            shown(cell.runtime_seconds),
            shown(ratio(base.runtime_seconds if base else None, cell.runtime_seconds)),
            shown(cell.train_loss, 4), shown(scaled(cell.figure("peak_bytes"), GB), 4),
        ]
        for setup, cell in rows
    ]  # fmt: skip
    headers = (
        "Setup", "Total GPUs", "Samples/s", "Samples/s Scale Factor", "Runtime (s)", "Runtime Scale Factor",
        "Loss", "GPU Memory Allocated (GB)",
    )  # fmt: skip
    notes = [RUNTIME, "Loss: mean over all steps, as Trainer's `train_loss`", *remarks(records)]
    return [LabTable(headers=headers, rows=body, notes=notes), _evaluation(rows)]


def _evaluation(rows: Sequence[Row]) -> LabTable:
    """What the job prints besides: evaluation loss by epoch, evaluated samples/s, exact match and F1."""
    epochs = max((cell.epochs for _, cell in rows), default=0)
    headers = [
        "Setup", *(f"Eval Loss (Epoch {epoch})" for epoch in range(1, epochs + 1)), "Eval Samples/s",
        "Exact Match (%)", "F1 (%)",
    ]  # fmt: skip
    body = [
        [
            setup,
            *(shown(cell.evaluation_loss(epoch), 4) for epoch in range(1, epochs + 1)),
            shown(cell.figure("evaluation_samples_per_second")),
            shown(cell.record.answers.exact_match if cell.record.answers else None),
            shown(cell.record.answers.f1 if cell.record.answers else None),
        ]
        for setup, cell in rows
    ]
    return LabTable(headers=headers, rows=body, title="Evaluation")


def _setups(found: Sequence[Facts]) -> list[Row]:
    """The baseline, then each number of ranks, as the hand-out names them."""
    first, rest = baseline(found), strategies(found)
    several = len({cell.group.label for cell in rest}) > 1
    rows = [("Single Node, Single GPU", first)] if first else []
    for cell in rest:
        nodes = cell.record.world.nodes
        where = "Single Node" if nodes == 1 else f"{nodes} Nodes"
        gpus = "Single GPU" if cell.ranks == 1 else f"{cell.ranks} GPUs"
        name = cell.group.label if several else cell.record.backend.name
        strategy = f", {name}" if several or cell.ranks == 1 else ""
        rows.append((f"{where}, {gpus}{strategy}", cell))
    return rows


def stages_tables(records: Sequence[Record]) -> list[LabTable]:
    """KAUST `deepspeed`: a line per metric, a column per stage, or per number of GPUs."""
    found = cells(records)
    first, rest = baseline(found), strategies(found)
    columns = [*([("Baseline", first)] if first else []), *((_stage(cell), cell) for cell in rest)]
    epochs = max((cell.epochs for _, cell in columns), default=0)
    lines: list[tuple[str, Callable[[Facts], str]]] = [
        ("Final Train Loss", lambda cell: shown(cell.train_loss, 4)),
        *((f"Eval Loss (Epoch {n})", _eval(n)) for n in range(1, epochs + 1)),
        ("Train Samples/sec", lambda cell: shown(cell.figure("samples_per_second"))),
        ("Eval Samples/sec", lambda cell: shown(cell.figure("evaluation_samples_per_second"))),
        ("Steps per Epoch", lambda cell: shown(cell.steps_per_epoch, 0)),
        ("Peak GPU Memory (MiB)", lambda cell: shown(scaled(cell.figure("peak_bytes"), MIB))),
        ("Average GPU Memory (MiB)", lambda _: MISSING),
        ("Mode for GPU Memory (MiB)", lambda _: MISSING),
        ("Peak CPU Memory (MiB)", lambda cell: shown(scaled(cell.figure("host_peak_bytes"), MIB))),
        ("Average CPU Memory (MiB)", lambda _: MISSING),
        ("Mode for CPU Memory (MiB)", lambda _: MISSING),
        (
            "Exact Match (%)",
            lambda cell: shown(cell.record.answers.exact_match if cell.record.answers else None),
        ),
        ("F1 (%)", lambda cell: shown(cell.record.answers.f1 if cell.record.answers else None)),
    ]
    body = [[name, *(read(cell) for _, cell in columns)] for name, read in lines]
    notes = [NOT_POLLED, "Baseline: one process on the job of one rank, if that was run", *remarks(records)]
    return [LabTable(headers=["Metric", *(name for name, _ in columns)], rows=body, notes=notes)]


def _eval(epoch: int) -> Callable[[Facts], str]:
    return lambda cell: shown(cell.evaluation_loss(epoch), 4)


def _stage(cell: Facts) -> str:
    name, _, options = cell.group.label.partition(":")
    stage = f"Stage {name.removeprefix('zero')}" if name.startswith("zero") else name
    return f"{stage}{', offload' if 'offload' in options else ''}, {cell.ranks} GPU{'s' * (cell.ranks > 1)}"


def custom_tables(records: Sequence[Record]) -> list[LabTable]:
    """KAUST `fsdp/custom_model`."""
    headers = (
        "Setup", "Total GPUs", "Samples/s (Default)", "Samples/s (Callback)", "GPU Memory (GB, Default)",
        "GPU Memory (GB, Callback)", "GPU Utilization (%)", "Loss", "Runtime (s)",
    )  # fmt: skip
    body = [
        [
            setup, str(cell.ranks), MISSING, shown(cell.figure("samples_per_second")), MISSING,
            shown(scaled(cell.figure("peak_bytes"), GB), 4), MISSING, shown(cell.train_loss, 4),
            shown(cell.runtime_seconds),
        ]
        for setup, cell in _setups(cells(records))
    ]  # fmt: skip
    notes = [ONE_CALLBACK, NO_UTILISATION, RUNTIME, *remarks(records)]
    return [LabTable(headers=headers, rows=body, notes=notes)]


def weak_tables(records: Sequence[Record]) -> list[LabTable]:
    """KAUST `fsdp/custom_model/weak_scaling`, with the efficiency that its formula means."""
    found = strategies(cells(records))
    base = found[0] if found else None
    headers = (
        "GPUs", "Num Layers", "Per-GPU Batch", "Total Params", "Samples/s (Callback)",
        "GPU Memory (GB, Callback)", "GPU Utilization (%)", "Loss", "Runtime (s)", "Efficiency (%)",
        "Work of a GPU",
    )  # fmt: skip
    body = []
    for cell in found:
        model, world = cell.record.model, cell.record.world
        work = ratio(work_per_rank(cell.record), work_per_rank(base.record) if base else None)
        times = ratio(base.runtime_seconds if base else None, cell.runtime_seconds)
        efficiency = None if work is None or times is None else 100 * work * times
        layers = model.geometry.layers if model and model.geometry else None
        body.append(
            [
                str(cell.ranks), shown(layers, 0), str(world.micro_batch_size),
                shown(model.parameters if model else None, 0), shown(cell.figure("samples_per_second")),
                shown(scaled(cell.figure("peak_bytes"), GB), 4), MISSING, shown(cell.train_loss, 4),
                shown(cell.runtime_seconds), shown(efficiency, 1), shown(work),
            ]
        )  # fmt: skip
    notes = [
        "Efficiency: (runtime on the fewest GPUs / runtime) x (work of a GPU / its work there). The hand-out "
        "divides the runtimes the other way round, so that a slower run scores higher",
        "Work of a GPU: FLOPs per step over those on the fewest GPUs; 1 is weak scaling",
        NO_UTILISATION, RUNTIME, *remarks(records),
    ]  # fmt: skip
    return [LabTable(headers=headers, rows=body, notes=notes)]


def images_tables(records: Sequence[Record]) -> list[LabTable]:
    """KAUST `ddp`: images/s and memory of GPU 0, with factors over one GPU."""
    found = strategies(cells(records))
    base = found[0] if found else None
    speed = base.figure("samples_per_second") if base else None
    body = [
        [
            f"{cell.ranks} GPU{'s' * (cell.ranks > 1)}, {cell.record.world.nodes} Node"
            f"{'s' * (cell.record.world.nodes > 1)}{' (baseline)' * (cell is base)}",
            shown(_last_epoch_loss(cell), 4), MISSING, shown(cell.figure("samples_per_second")),
            shown(scaled(cell.figure("peak_bytes"), MIB)), MISSING, MISSING,
            shown(ratio(cell.figure("samples_per_second"), speed)),
            shown(ratio(cell.figure("peak_bytes"), base.figure("peak_bytes") if base else None)),
        ]
        for cell in found
    ]  # fmt: skip
    headers = (
        "Config", "Train Loss (Epoch 3)", "Train Acc (Epoch 3)", "Throughput (img/s)", "GPU 0 Peak (MiB)",
        "GPU 0 Avg (MiB)", "GPU 0 Mode (MiB)", "Throughput Scaling vs 1G", "Memory Avg Scaling vs 1G",
    )  # fmt: skip
    notes = [
        "Train Loss: mean over the steps of the last epoch; accuracy is not counted", NOT_POLLED,
        "GPU 0 Peak: of the rank with the highest; the scaling of memory is that of peaks", *remarks(records),
    ]  # fmt: skip
    return [LabTable(headers=headers, rows=body, notes=notes)]


def _last_epoch_loss(cell: Facts) -> float | None:
    steps = cell.record.steps[-(cell.steps_per_epoch or 1) :]
    losses = [step.loss for step in steps if step.loss is not None]
    return sum(losses) / len(losses) if losses else None


def times_tables(records: Sequence[Record]) -> list[LabTable]:
    """CINECA: nodes, GPUs, training time, speed-up, for each strategy."""
    found = strategies(cells(records))
    body = []
    for label in dict.fromkeys(cell.group.label for cell in found):
        curve = [cell for cell in found if cell.group.label == label]
        body += [
            [
                label, str(cell.record.world.nodes), str(cell.ranks), shown(cell.runtime_seconds),
                shown(ratio(curve[0].runtime_seconds, cell.runtime_seconds)),
            ]
            for cell in curve
        ]  # fmt: skip
    headers = ("Strategy", "Nodes", "GPUs", "Training time (s)", "Speed-up")
    return [LabTable(headers=headers, rows=body, notes=[RUNTIME, *remarks(records)])]


def strategies_tables(records: Sequence[Record]) -> list[LabTable]:
    """What the FSDP guide's text compares: memory, traffic and speed by strategy and offload."""
    headers = (
        "Strategy", "GPUs", "Ran as", "Peak memory (GB)", "Model states (GB)", "Sent per step (GB)",
        "Samples/s",
    )  # fmt: skip
    body = [
        [
            cell.group.label, str(cell.ranks),
            cell.record.backend.effective.strategy if cell.record.backend.effective else MISSING,
            shown(scaled(cell.figure("peak_bytes"), GB), 4),
            shown(scaled(cell.figure("model_state_bytes"), GB), 4),
            shown(scaled(cell.figure("sent_bytes_per_step"), GB), 4),
            shown(cell.figure("samples_per_second")),
        ]
        for cell in cells(records)
    ]  # fmt: skip
    return [LabTable(headers=headers, rows=body, notes=remarks(records))]


def dtypes_tables(records: Sequence[Record]) -> list[LabTable]:
    """The Accelerate talk: the dtype of each part of the model states, read back from what ran."""
    headers = (
        "Strategy", "Forward weights", "Autocast", "Master weights", "Gradients", "Reduced in",
        "Optimizer states",
    )  # fmt: skip
    body = []
    for cell in cells(records):
        effective, observed = cell.record.backend.effective, cell.record.observed
        if effective is not None:
            body.append(
                [
                    cell.group.label, effective.parameter_dtype, effective.autocast_dtype or "none",
                    effective.master_dtype, effective.gradient_dtype or MISSING,
                    effective.reduce_dtype or "nothing",
                    ", ".join(observed.optimizer_state_dtypes) if observed else MISSING,
                ]
            )  # fmt: skip
    return [LabTable(headers=headers, rows=body, notes=remarks(records))]


MS = 1e-3
NOTES = (
    "Of the traced step of median duration among all ranks, which the profiler slows down: computing, "
    "exposed communication and idling add up to it",
    "Hidden: share of the communication beside which something computes",
)


def waits_tables(records: Sequence[Record]) -> list[LabTable]:
    """A line for each strategy with its options."""
    headers = (
        "Strategy", "GPUs", "Step (ms)", "Computing (ms)", "Communication (ms)", "Exposed (ms)", "Idle (ms)",
        "Hidden (%)", "Longest wait for", "Peak memory (GB)",
    )  # fmt: skip
    body = [
        [cell.group.label, str(cell.ranks), *_divided(cell), shown(scaled(cell.figure("peak_bytes"), GB), 4)]
        for cell in strategies(cells(records))
    ]
    return [LabTable(headers=headers, rows=body, notes=[*NOTES, *remarks(records)])]


def _divided(cell: Facts) -> list[str]:
    parts = [part for rank in cell.record.ranks for part in rank.overlap]
    if not parts:
        return [MISSING] * 7
    step = median_step(parts)
    times = (
        step.seconds, step.compute_seconds, step.communication_seconds, step.exposed_seconds,
        step.idle_seconds,
    )  # fmt: skip
    return [*(shown(scaled(seconds, MS), 1) for seconds in times), shown(_hidden(step), 0), _longest(parts)]


def _hidden(step: OverlapPart) -> float | None:
    """In per cent; None without communication."""
    if not step.communication_seconds:
        return None
    return 100 * (1 - step.exposed_seconds / step.communication_seconds)


def _longest(parts: Sequence[OverlapPart]) -> str:
    waits = [wait for part in parts for wait in part.waits]
    if not waits:
        return MISSING
    wait = max(waits, key=lambda wait: wait.seconds)
    return f"{wait.name}, {wait.phase}"


MODELS = ("bert-base-cased", "llama-3-8b")
DTYPES = {"float32": 4.0, "float16, bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a parameter."""
LECTURE_MODEL = "llama-3.1-70b"
LECTURE_STRATEGIES = ("fsdp1-no-shard", "fsdp1-grad-op", "fsdp1", "fsdp1-hybrid")
LECTURE_RANKS = (128, 1280)


def memory_tables() -> list[LabTable]:
    """The Accelerate talk: weights, gradients, both, and with Adam, in one dtype; then mixed precision."""
    headers = ("Model", "Dtype", "Weights", "Gradients", "Backward pass", "Step with Adam")
    body = []
    for name in MODELS:
        parameters = load_model(name).parameters
        for dtype, width in DTYPES.items():
            weights = parameters * width
            training = (weights, 2 * weights, 4 * weights) if width >= 2 else (None, None, None)
            body.append([name, dtype, *map(_size, (weights, *training))])
        mixed = (2 * parameters, 2 * parameters, 4 * parameters, 16 * parameters)
        body.append([name, "mixed: 16-bit, fp32 masters", *map(_size, mixed)])
    notes = (
        "Backward pass: weights and gradients; step: with Adam's two moments, and under mixed precision the "
        "fp32 masters. Activations come on top: `harness estimate`",
        "Parameters only; Accelerate also counts buffers, of bert-base-cased 8 KiB of positions",
        "int8 and int4 hold weights; nothing is trained in them",
    )
    return [LabTable(headers=headers, rows=body, notes=notes)]


def lecture_tables() -> list[LabTable]:
    """The FSDP lecture: what a GPU holds and sends, by strategy and number of GPUs, 16-bit compute."""
    settings = ["training.precision=bf16-mixed", "training.micro_batch_size=1", "data.sequence_length=4096"]
    asked = question(
        load_model(LECTURE_MODEL), load_experiment(None, settings), backends=LECTURE_STRATEGIES,
        world_sizes=LECTURE_RANKS, ranks_per_node=8,
    )  # fmt: skip
    rows: list[dict[str, Any]] = document(asked, estimate(asked))["rows"]
    headers = (
        "Strategy", "GPUs", "Weights (GB)", "Gathered (GB)", "Gradients (GB)", "Adam (GB)",
        "Sent per step (GB)", "Of NO_SHARD",
    )  # fmt: skip
    sent = {
        row["world_size"]: row["sent_bytes_per_step"] for row in rows if row["backend"] == "fsdp1-no-shard"
    }
    body = [
        [
            row["backend"], str(row["world_size"]),
            shown(scaled(row["weights_bytes"], GB), 3), shown(scaled(row["gathered_bytes"], GB), 2),
            shown(scaled(row["gradients_bytes"], GB), 3),
            shown(scaled(row["optimizer_parts"]["moments_bytes"], GB), 3),
            shown(scaled(row["sent_bytes_per_step"], GB), 1),
            shown(ratio(row["sent_bytes_per_step"], sent[row["world_size"]])),
        ]
        for row in rows
    ]  # fmt: skip
    notes = (
        f"{LECTURE_MODEL}, mixed precision with fp32 shards, micro-batch 1 of 4,096 tokens, nodes of 8 "
        "GPUs; hybrid shards within a node",
        "Ring algorithm, all collectives of a step, the gradient norm included",
    )
    return [LabTable(headers=headers, rows=body, notes=notes)]


def _size(count: float | None) -> str:
    """Binary units, as the talk has them."""
    if count is None:
        return shown(None)
    return f"{count / MIB:,.2f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"


OF_RECORDS: dict[TableKind, Callable[[Sequence[Record]], list[LabTable]]] = {
    "scaling": scaling_tables,
    "stages": stages_tables,
    "strategies": strategies_tables,
    "custom": custom_tables,
    "weak": weak_tables,
    "images": images_tables,
    "dtypes": dtypes_tables,
    "times": times_tables,
    "waits": waits_tables,
}
OF_ARITHMETIC: dict[TableKind, Callable[[], list[LabTable]]] = {
    "lecture": lecture_tables,
    "memory": memory_tables,
}


def fill(lab: Lab, records: Sequence[Record]) -> list[LabTable]:
    """The tables of a lab; one of arithmetic needs no records."""
    return OF_ARITHMETIC[lab.table]() if lab.table in OF_ARITHMETIC else OF_RECORDS[lab.table](records)
