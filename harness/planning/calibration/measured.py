"""Records as the time model takes them: a scenario per cell, and its measured step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median

from harness.errors import HarnessError
from harness.fabric.result import FabricResult, read_fabric
from harness.judge.measures import step_seconds
from harness.planning.device import Device, Fabric
from harness.planning.hardware import load_hardware
from harness.planning.model import PlannedModel
from harness.planning.scenario import Scenario
from harness.planning.work import Work
from harness.record import Record
from harness.record.workload import known_strategy, of_record
from harness.store import read_runs

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


def measured_cells(sources: Sequence[Path], fabric: Fabric | None = None) -> list[MeasuredCell]:
    """The cells of folders and archives of runs; `fabric*.json` next to the runs says what the network gives.

    fabric: for runs on several nodes without such a file. Raises HarnessError where nothing was timed, or a
    network is not known.
    """
    found = []
    for source in sources:
        results = _fabric_results(source)
        group = source.name if source.is_dir() else source.absolute().parent.name
        cells: dict[tuple[object, ...], list[Record]] = {}
        records, problems = read_runs([source])
        if problems:
            raise HarnessError(f"--calibrate: {problems[0]}")
        for _, record in records:
            if step_seconds(record) and record.layout and record.model and record.model.geometry:
                cells.setdefault(_key(record), []).append(record)
        found += [
            cell for records in cells.values() if (cell := _cell(records, group, results, fabric)) is not None
        ]
    if not found:
        names = ", ".join(map(str, sources))
        raise HarnessError(
            f"--calibrate {names}: no run there has timed steps; give runs of `harness compare` of 20 steps "
            "or more"
        )
    return found


def _key(record: Record) -> tuple[object, ...]:
    world, job = record.world, record.job
    return (
        record.backend.label, world.world_size, world.nodes, world.micro_batch_size,
        world.accumulation_steps, job.data.sequence_length, job.training.precision, record.job_id,
    )  # fmt: skip


def _cell(
    records: Sequence[Record], group: str, results: Sequence[FabricResult], fabric: Fabric | None
) -> MeasuredCell | None:
    first = records[0]
    device = _device(first)
    measured = [r for r in results if r.world_size == first.world.world_size]
    network = _network(first, measured) or fabric
    scenario = scenario_of_record(first, device, network)
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
        runs=tuple(tuple(step_seconds(record)) for record in records),
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


def _fabric_results(source: Path) -> list[FabricResult]:
    folder = source if source.is_dir() else source.parent
    return [read_fabric(path) for path in sorted(folder.glob(FABRIC_FILES))]
