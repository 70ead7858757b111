"""What `harness simulate` asks: one rank of a run on nodes of equal size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.cell_layout import job_layout
from harness.cells import Cell, make_cell, make_request
from harness.errors import HarnessError
from harness.run_directory.simulation import SimulationRequest, Tensors
from harness.spec import Experiment, ModelSection


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A cell and the rank of it that is simulated."""

    cell: Cell
    request: SimulationRequest


def with_model(experiment: Experiment, config: Mapping[str, Any]) -> Experiment:
    """The same job for another model, given as values of its Hugging Face configuration."""
    given = experiment.model
    section = ModelSection(config=dict(config), attention=given.attention, dropout=given.dropout)
    return experiment.model_copy(update={"model": section})


def plan_simulation(
    experiment: Experiment,
    label: str,
    world_size: int,
    *,
    ranks_per_node: int,
    rank: int = 0,
    tensors: Tensors = "fake",
) -> Simulated:
    """The cell of a backend in a world and what is asked of one of its ranks.

    Without a batch in the job the micro-batch is one sample. Raises HarnessError for a world that nodes or
    the batch do not divide.
    """
    per_node = min(ranks_per_node, world_size)
    if world_size % per_node:
        raise HarnessError(
            f"{world_size} ranks do not fill nodes of {per_node}; give a --world-size that "
            "--gpus-per-node divides"
        )
    if not 0 <= rank < world_size:
        raise HarnessError(f"rank {rank} is not in a world of {world_size}; give 0 to {world_size - 1}")
    training = experiment.training
    if training.global_batch_size is None and training.micro_batch_size is None:
        training = training.model_copy(update={"micro_batch_size": 1})
        experiment = experiment.model_copy(update={"training": training})
    layout = job_layout([label], world_size, training)
    cell = make_cell(experiment, label, world_size, layout, 0, "cpu", nodes=world_size // per_node)
    run = make_request(cell, experiment, "cpu", [], ranks_per_node=per_node)
    return Simulated(cell=cell, request=SimulationRequest(run=run, rank=rank, tensors=tensors))
