"""The hand-outs' tables of measured figures, with the columns, rows and units that they have there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.judge.findings.weak_scaling import work_per_rank
from harness.labs.document import GB, MIB, MISSING, LabTable, ratio, scaled, shown
from harness.labs.facts import Facts, baseline, cells, remarks, strategies
from harness.record import Record

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
