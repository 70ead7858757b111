"""Constants of the time model from records of this place, and how far they miss records left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import PositiveFloat, ValidationError, field_validator

from harness.bounds import MOST_DOCUMENT_BYTES
from harness.errors import HarnessError
from harness.fabric.result import FabricResult, read_fabric
from harness.files import Stored, read_plain, write_atomically
from harness.judge.quantities import Run
from harness.plan.hardware import Device, Fabric, TimeConstants, default_constants, load_hardware
from harness.plan.model import PlannedModel
from harness.plan.scenario import Scenario
from harness.plan.step_time import Work, overlap_rule, seconds_of_step
from harness.record import Record
from harness.record.store import read_runs
from harness.record.workload import known_strategy, of_record

SCHEMA_VERSION: Literal[1] = 1
CLEARLY = 0.05
"""Cells whose step times differ by less are not put into an order."""


class CellFit(Stored):
    """One cell: its step as it was measured and as the model has it."""

    cell: str
    group: str
    """Cells of one group ran over the same network: their order is a question."""
    measured_seconds: PositiveFloat
    """Median of the timed steps of all its runs."""
    spread: float
    """Largest minus smallest median of its runs, over the median: what repetition alone changes."""
    fitted_seconds: float
    left_out_seconds: float | None
    """By constants from all other cells; None: there are too few."""

    @property
    def error(self) -> float | None:
        """Relative, of the prediction that did not see this cell."""
        return None if self.left_out_seconds is None else self.left_out_seconds / self.measured_seconds - 1


class Calibration(Stored):
    """Constants of one kind of device and its network."""

    schema_version: Literal[1] = SCHEMA_VERSION
    device: str
    transport: str
    constants: dict[str, float]
    cells: list[CellFit]
    not_used: list[str] = []
    """Cells that were found and not fitted, with the reason."""
    load_averages: tuple[float, float] | None = None
    """Least and most that the runs found on their machine."""

    @field_validator("constants")
    @classmethod
    def _are_known(cls, constants: dict[str, float]) -> dict[str, float]:
        shares = {field.name for field in fields(TimeConstants) if field.type == "float"}
        if unknown := sorted(constants.keys() - shares):
            raise ValueError(f"constant '{unknown[0]}' is unknown")
        return constants

    @property
    def errors(self) -> list[float]:
        return [abs(cell.error) for cell in self.cells if cell.error is not None]

    def time_constants(self, device: Device) -> TimeConstants:
        """The constants for predictions. Raises HarnessError for another device than the calibrated one."""
        check_device(self.device, device)
        values = self.constants
        return replace(
            default_constants(device),
            **values,  # type: ignore[arg-type]
            matrix_source=self.origin,
            attention_source=self.origin,
            origin=self.origin,
            fitted=tuple(sorted(values)),
        )

    @property
    def origin(self) -> str:
        """Where a prediction's constants come from, with their error."""
        return f"calibrated on {len(self.cells)} cells; {self.accuracy}"

    @property
    def accuracy(self) -> str:
        """The error on cells left out, in words."""
        if not self.errors:
            return "too few cells to leave one out: error unknown"
        right, pairs = self.order()
        order = f", order right in {right} of {pairs} pairs" if pairs else ""
        return (
            f"each predicted from the others: median error {median(self.errors):.1%}, "
            f"mean {mean(self.errors):.1%}, worst {max(self.errors):.1%}{order}"
        )

    def order(self) -> tuple[int, int]:
        """How many pairs of a group that differ by over 5 % are in the right order, and all such pairs."""
        right = total = 0
        for one, other in combinations(self.cells, 2):
            if one.group != other.group or one.left_out_seconds is None or other.left_out_seconds is None:
                continue
            measured = one.measured_seconds - other.measured_seconds
            if abs(measured) <= CLEARLY * min(one.measured_seconds, other.measured_seconds):
                continue
            total += 1
            right += measured * (one.left_out_seconds - other.left_out_seconds) > 0
        return right, total


def check_device(calibrated: str, device: Device) -> None:
    """Refuse constants of one device for another."""
    if device.name != calibrated:
        raise HarnessError(
            f"this calibration was made on {calibrated}, not {device.name}; calibrate with records of "
            f"{device.name}, or leave --calibrate out for published constants"
        )


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write the document. Raises HarnessError."""
    try:
        write_atomically(path, calibration.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise HarnessError(f"calibration '{path}' cannot be written: {error.strerror}") from error


def read_calibration(path: Path) -> Calibration:
    """Read a document. Raises HarnessError if it is none."""
    try:
        return Calibration.model_validate_json(read_plain(path, MOST_DOCUMENT_BYTES))
    except OSError as error:
        raise HarnessError(f"calibration {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise HarnessError(
            f"{path} is not a calibration that this version reads; give a folder or archive of runs to "
            "make one"
        ) from error


CPU_FLOPS, CPU_BANDWIDTH = 1e11, 1e10
"""Round figures in place of a data sheet: the shares that a calibration finds are of these."""
FABRIC_FILES = "fabric*.json"


@dataclass(frozen=True, kw_only=True)
class MeasuredCell:
    """Runs of one backend in one world over one network."""

    name: str
    group: str
    scenario: Scenario
    device: Device
    runs: tuple[tuple[float, ...], ...]
    """Seconds of the timed steps, by run."""
    latency_seconds: float | None
    """Of a small all-reduce of the same ranks, as `harness fabric` saw it."""
    exposed_share: float | None
    """Of the communication, by the traces of these runs."""
    load_averages: tuple[float, ...]

    @cached_property
    def work(self) -> Work:
        return Work(self.scenario)

    @property
    def seconds(self) -> float:
        return median(step for run in self.runs for step in run)

    @property
    def spread(self) -> float:
        medians = [median(run) for run in self.runs]
        return (max(medians) - min(medians)) / self.seconds


def measured_cells(sources: Sequence[Path]) -> list[MeasuredCell]:
    """The cells of folders and archives of runs; `fabric*.json` next to the runs says what the network gives.

    Raises HarnessError where nothing was timed.
    """
    found = []
    for source in sources:
        folder = source if source.is_dir() else source.parent
        results = [read_fabric(path) for path in sorted(folder.glob(FABRIC_FILES))]
        group = source.name if source.is_dir() else source.absolute().parent.name
        cells: dict[tuple[object, ...], list[Record]] = {}
        try:
            records, problems = read_runs([source])
        except HarnessError:
            if source.is_file() and b"busbw" in read_plain(source, MOST_DOCUMENT_BYTES):
                raise HarnessError(
                    f"--calibrate {source} is output of nccl-tests, which times the network alone; give "
                    "runs of `harness compare`, and the network as a fabric of --hardware FILE"
                ) from None
            raise
        if problems:
            raise HarnessError(f"--calibrate: {problems[0]}")
        for _, record in records:
            if Run.of(record).step_seconds and record.layout and record.model and record.model.geometry:
                world, job = record.world, record.job
                key = (
                    record.backend.label, world.world_size, world.nodes, world.micro_batch_size,
                    world.accumulation_steps, job.data.sequence_length, job.training.precision,
                    record.job_id,
                )  # fmt: skip
                cells.setdefault(key, []).append(record)
        made = (_cell(records, group, results) for records in cells.values())
        found += [cell for cell in made if cell is not None]
    if not found:
        names = ", ".join(map(str, sources))
        raise HarnessError(
            f"--calibrate {names}: no run there has timed steps; give runs of `harness compare` of 20 steps "
            "or more"
        )
    return found


def _cell(records: Sequence[Record], group: str, results: Sequence[FabricResult]) -> MeasuredCell | None:
    first = records[0]
    device = _device(first)
    measured = [r for r in results if r.world_size == first.world.world_size]
    scenario = scenario_of_record(first, device, _network(first, measured))
    if scenario is None:
        return None
    parts = [part for record in records for rank in record.ranks for part in rank.overlap]
    talking = sum(part.communication_seconds for part in parts)
    latencies = [seconds for r in measured if (seconds := r.latency_seconds()) is not None]
    loads = (record.environment.load_average for record in records)
    return MeasuredCell(
        name=f"{group}: {first.backend.label} on {first.world.world_size}",
        group=f"{group} on {first.world.world_size}",
        scenario=scenario,
        device=device,
        runs=tuple(tuple(Run.of(record).step_seconds) for record in records),
        latency_seconds=mean(latencies) if latencies else None,
        exposed_share=sum(part.exposed_seconds for part in parts) / talking if talking else None,
        load_averages=tuple(load for load in loads if load is not None),
    )


def scenario_of_record(record: Record, device: Device, fabric: Fabric | None) -> Scenario | None:
    """The scenario that a record measured; None: a third party's backend, or the model is not described."""
    strategy, workload = known_strategy(record), of_record(record)
    if strategy is None or workload is None or record.model is None or record.model.geometry is None:
        return None
    geometry, world = record.model.geometry, record.world
    model = PlannedModel(
        name=record.model.architecture,
        source=f"record {record.run_id}",
        architecture=record.model.architecture,
        config={**(record.job.model.config or {}), **record.model.config},
        layout=workload.layout,
        multiplying_parameters=geometry.multiplying_parameters,
        layers=geometry.layers,
        attention_width=geometry.attention_width,
    )
    return Scenario(
        model=model,
        job=record.job,
        label=record.backend.label,
        strategy=strategy,
        options=record.backend.options,
        world_size=world.world_size,
        ranks_per_node=world.ranks_per_node,
        shard_size=workload.shard_size if strategy.facts.has_replicas else None,
        preset=workload.preset,
        micro_batch_size=world.micro_batch_size,
        accumulation_steps=world.accumulation_steps,
        torch_device=world.device,
        transport=world.collectives,
        device=device,
        fabric=fabric,
    )


def _device(record: Record) -> Device:
    """The GPU by torch's name of it; a processor with round figures in place of a data sheet."""
    name = record.ranks[0].device_name if record.ranks else record.environment.cpu
    if record.world.device == "cuda":
        return load_hardware().device(name)
    return Device(
        name=f"CPU {record.environment.cpu}",
        memory_bytes=record.environment.memory_bytes,
        context_bytes=0,
        memory_bandwidth=CPU_BANDWIDTH,
        peak_flops={"float32": CPU_FLOPS, "bfloat16": CPU_FLOPS, "float16": CPU_FLOPS},
        link_bandwidth=CPU_BANDWIDTH,
        link="memory",
        watts=None,
        source="round figures",
    )


def _network(record: Record, results: Iterable[FabricResult]) -> Fabric | None:
    """What self-tests of as many ranks measured, next to the runs or right before them."""
    world = record.world
    if world.nodes == 1:
        return None
    rates = [rate for result in results if (rate := result.bus_bandwidth()) is not None]
    own = record.environment.fabric
    if not rates and own is not None and own.all_reduce_bus_bytes_per_second is not None:
        rates = [own.all_reduce_bus_bytes_per_second]
    if not rates:
        return None
    return Fabric(
        name=f"measured, {mean(rates) * 8 / 1e9:.2f} Gbit/s",
        bandwidth_per_gpu=mean(rates) / world.ranks_per_node,
        latency_seconds=0.0,
        source="harness fabric",
    )


LEAST_CELLS = 3
NOISE = 0.08
"""Standard deviation of a cell's median step, relative: on shared machines repetitions differ by so much."""
TOLERANCE = 1e-5
"""Relative change at which a search ends: far below the noise."""
Vector = npt.NDArray[np.float64]


def calibrate(found: Sequence[MeasuredCell]) -> Calibration:
    """Fit to all cells, and to all but each one for the error.

    Raises HarnessError for fewer than three cells, or cells of several devices or transports.
    """
    cells, not_used = comparable(found)
    if len(cells) < LEAST_CELLS:
        raise HarnessError(
            f"--calibrate: {len(cells)} usable cells are too few to fit constants; "
            f"give at least {LEAST_CELLS}, such as a comparison of ddp, zero3 and fsdp"
            + "".join(f"; not used: {line}" for line in not_used[:1])
        )
    for what, values in (
        ("devices", {cell.device.name for cell in cells}),
        ("transports", {cell.scenario.transport for cell in cells}),
    ):
        if len(values) > 1:
            raise HarnessError(
                f"--calibrate: the runs are of several {what} ({', '.join(sorted(values))}); give runs of one"
            )
    base, deviations = starting_point(cells)
    fitted = _fit(cells, base, deviations)
    fits = []
    for cell in cells:
        without: float | None = None
        if len(cells) > LEAST_CELLS:
            others = [other for other in cells if other is not cell]
            without = seconds_of_step(cell.work, cell.device, _fit(others, base, deviations, start=fitted))
        fits.append(
            CellFit(
                cell=cell.name, group=cell.group, measured_seconds=cell.seconds, spread=cell.spread,
                left_out_seconds=without,
                fitted_seconds=seconds_of_step(cell.work, cell.device, fitted),
            )
        )  # fmt: skip
    loads = [load for cell in cells for load in cell.load_averages]
    names = [*deviations, *(_FIXED if cells[0].scenario.torch_device == "cpu" else ())]
    return Calibration(
        device=cells[0].device.name,
        transport=cells[0].scenario.transport,
        constants={name: getattr(fitted, name) for name in names},
        cells=fits,
        not_used=not_used,
        load_averages=(min(loads), max(loads)) if loads else None,
    )


def comparable(cells: Sequence[MeasuredCell]) -> tuple[list[MeasuredCell], list[str]]:
    """Cells that one set of constants can describe, and why others cannot be among them.

    Ranks on CPUs share processors, so that a rank of another world is another device: the most frequent
    world size stays.
    """
    sizes = Counter(cell.scenario.world_size for cell in cells)
    most = max(sizes, key=lambda size: (sizes[size], size), default=0)
    used, not_used = [], []
    for cell in cells:
        scenario = cell.scenario
        if scenario.torch_device == "cpu" and scenario.world_size != most:
            not_used.append(f"{cell.name}: ranks share processors otherwise than on {most} ranks")
        elif scenario.nodes > 1 and scenario.fabric is None:
            not_used.append(f"{cell.name}: no self-test of its network (fabric-*.json) lies next to the runs")
        else:
            used.append(cell)
    return used, not_used


_FIXED = {
    "sustained_share": 1.0,
    "attention_share": 1.0,
    "link_step_seconds": 0.0,
    "kernel_seconds": 0.0,
    "dispatch_seconds": 0.0,
}
"""On a CPU: shares that mean the same as another, and latencies that the time of a call holds already."""


def starting_point(cells: Sequence[MeasuredCell]) -> tuple[TimeConstants, dict[str, float]]:
    """Constants before the fit, and deviations of the natural logarithms of those that are fitted."""
    base = default_constants(cells[0].device)
    latencies = [cell.latency_seconds for cell in cells if cell.latency_seconds is not None]
    exposed = []
    for cell in cells:
        rule = overlap_rule(cell.work.workload)
        overlaps = cell.scenario.world_size > 1 and (rule.gathers_ahead or rule.reduces_beside)
        if cell.exposed_share is not None and overlaps:
            exposed.append(cell.exposed_share)
    on_cpu = cells[0].scenario.torch_device == "cpu"
    if on_cpu:
        base = replace(base, **_FIXED, matrix_share=0.1, memory_share=0.3, link_share=0.1)  # type: ignore[arg-type]
        base = replace(base, call_seconds=2e-3, contention=0.5)
    if latencies:
        base = replace(base, call_seconds=median(latencies), link_step_seconds=0.0)
    if exposed:
        base = replace(base, contention=min(1.0, max(0.02, median(exposed))))
    base = replace(base, fabric_share=1.0 if latencies else base.fabric_share, step_overhead_seconds=1e-3)
    unknown = 2.0 if on_cpu else 0.3
    return base, {
        "matrix_share": unknown, "memory_share": unknown, "link_share": unknown, "fabric_share": 0.15,
        "call_seconds": 0.3 if latencies else 1.0, "host_factor": 0.4, "contention": 1.0,
        "step_overhead_seconds": 2.0,
    }  # fmt: skip


def _fit(
    cells: Sequence[MeasuredCell],
    base: TimeConstants,
    deviations: dict[str, float],
    *,
    start: TimeConstants | None = None,
) -> TimeConstants:
    """`start`: where the search begins; the priors, the constants of `base`, hold whatever it is."""
    from scipy.optimize import least_squares

    expected, first = (np.log([getattr(at, name) for name in deviations]) for at in (base, start or base))
    allowed = np.array(list(deviations.values()))
    measured = np.array([cell.seconds for cell in cells])

    def constants_at(point: Vector) -> TimeConstants:
        values = {name: float(np.exp(x)) for name, x in zip(deviations, point, strict=True)}
        values["contention"] = min(1.0, values["contention"])
        return replace(base, **values)  # type: ignore[arg-type]

    def residuals(point: Vector) -> Vector:
        constants = constants_at(point)
        predicted = np.array([seconds_of_step(cell.work, cell.device, constants) for cell in cells])
        return np.concatenate([np.log(predicted / measured) / NOISE, (point - expected) / allowed])

    # A cell that a neighbour on the machine has slowed down must not bend all others.
    solution = least_squares(residuals, first, loss="soft_l1", ftol=TOLERANCE, xtol=TOLERANCE)
    return constants_at(solution.x)
