"""Scenarios of runs that this machine is about to make: the model as a check of the job found it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.job.job import Job
from harness.launch.cells import Cell
from harness.plan.devices.device import Device
from harness.plan.model import PlannedModel
from harness.plan.scenario import Scenario
from harness.record import DataPart, LayoutPart, ModelPart
from harness.record.workload import closed_form_layout
from harness.run_directory.request import RunRequest

INT64_BYTES = 8


def planned_model(facts: Mapping[str, Any], job: Job) -> PlannedModel:
    """The model of a job. `facts`: what the check of the job returned (`rank.check`)."""
    model, layout = ModelPart(**facts["model"]), closed_form_layout(LayoutPart(**facts["layout"]))
    config: dict[str, Any] = facts["configuration"]
    geometry = model.geometry
    return PlannedModel(
        name=job.model.name or str(config.get("model_type", model.architecture)),
        source=f"model.factory {job.model.factory}" if job.model.factory else "the configuration of the job",
        architecture=model.architecture,
        config=config,
        layout=layout,
        multiplying_parameters=geometry.multiplying_parameters if geometry else model.parameters,
        layers=geometry.layers if geometry else len(layout.blocks),
        attention_width=geometry.attention_width if geometry else 0,
        whole_because=model.whole_because,
    )


def data_bytes(facts: Mapping[str, Any], job: Job, torch_device: str) -> int:
    """What the samples of a job keep where its ranks have their tensors: two numbers each, and their order of
    this epoch; 0 beside GPUs.

    `rank.data.samples`: lengths, targets and the permutation, int64; tokens lie outside of the allocator.
    """
    if torch_device != "cpu":
        return 0
    data = DataPart(**facts["data"])
    numbers = 2 * data.samples + (data.training_samples if job.data.shuffle else 0)
    return INT64_BYTES * numbers


def scenario_of(
    cell: Cell, model: PlannedModel, torch_device: str, *, device: Device | None = None
) -> Scenario | None:
    """The scenario of a cell on nodes of equal size; None for a third party's backend."""
    return Scenario.of(
        cell.backend, model, cell.job, world_size=cell.world_size,
        ranks_per_node=cell.world_size // cell.nodes, preset=cell.preset,
        micro_batch_size=cell.layout.micro_batch_size, accumulation_steps=cell.layout.accumulation_steps,
        torch_device=torch_device, device=device,
    )  # fmt: skip


def scenario_of_request(
    request: RunRequest, model: PlannedModel, *, device: Device | None = None
) -> Scenario | None:
    """The same of a run that is prepared."""
    return Scenario.of(
        request.backend, model, request.job, world_size=request.world_size,
        ranks_per_node=request.ranks_per_node, preset=request.preset,  # type: ignore[arg-type]
        micro_batch_size=request.micro_batch_size, accumulation_steps=request.accumulation_steps,
        torch_device=request.device, device=device,
    )  # fmt: skip
