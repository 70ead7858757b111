"""The model of a job before any of its runs, and scenarios of runs that this machine is about to make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import HarnessError
from harness.job.job import DEFAULT_TASK, Job
from harness.launch.cells import Cell
from harness.launch.launcher import require_libraries
from harness.plan.devices.device import Device
from harness.plan.model import PlannedModel
from harness.plan.models import from_config, load_model
from harness.plan.scenario import Scenario
from harness.record import DataPart, LayoutPart, ModelPart
from harness.record.workload import closed_form_layout
from harness.run_directory.request import RunRequest

INT64_BYTES = 8
BYTES_VOCABULARY = 257
"""Of the tokenizer 'bytes': 256 values and the end of a text (`rank.data.tokens`, which a test compares)."""


def job_model(job: Job, named: str | None = None, assignments: Sequence[str] = ()) -> PlannedModel:
    """The model that `--model` names, with `assignments` of its configuration, else the job's: by name as
    `load_model` finds it or of `model.config`.

    Of another task than causal-lm, where model or data come from a factory, where code of the model's folder
    may run, and where groups of the optimizer freeze parameters, it is built without weights, which imports
    torch and reads the job's data: they decide classes and vocabulary, and where gradients go. Raises
    HarnessError; a vocabulary that only a tokenizer knows must be given.
    """
    if named is not None:
        return load_model(named, assignments=assignments)
    own = job.model.factory or job.data.factory or job.model.trust_remote_code
    if job.task != DEFAULT_TASK or own or job.optimizer.freezes:
        return _built(job)
    if job.model.name is not None:
        return load_model(job.model.name, by_known_type=False)  # as a run, which would need its code
    config = job.model.config_values()
    if "vocab_size" not in config:
        if job.data.tokenizer != "bytes":
            raise HarnessError(
                f"model.config needs vocab_size: only the tokenizer '{job.data.tokenizer}' knows it; "
                "or name a model with --model"
            )
        config["vocab_size"] = BYTES_VOCABULARY
    return from_config(config, name=str(config["model_type"]), source="model.config", given_whole=False)


def _built(job: Job) -> PlannedModel:
    require_libraries("plans of a job whose model or data must be built first")
    from harness.rank.job_check import read_model_facts  # loads torch and transformers

    return planned_model(read_model_facts(job), job)


def planned_model(facts: Mapping[str, Any], job: Job) -> PlannedModel:
    """The model of a job. `facts`: what the check of the job returned (`rank.job_check`)."""
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
        loading=cell.loading, torch_device=torch_device, device=device,
    )  # fmt: skip


def scenario_of_request(
    request: RunRequest, model: PlannedModel, *, device: Device | None = None
) -> Scenario | None:
    """The same of a run that is prepared."""
    return Scenario.of(
        request.backend, model, request.job, world_size=request.world_size,
        ranks_per_node=request.ranks_per_node, preset=request.preset,  # type: ignore[arg-type]
        micro_batch_size=request.micro_batch_size, accumulation_steps=request.accumulation_steps,
        loading=request.loading, torch_device=request.device, device=device,
    )  # fmt: skip
