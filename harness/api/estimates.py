"""What a job would need on GPUs that are not here, for programs and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.api.command import assignments
from harness.job.config import load_experiment

if TYPE_CHECKING:
    from pandas import DataFrame

    from harness.plan.estimate.question import Question
    from harness.plan.estimate.row import EstimateRow


class Estimate:
    """Rows of an estimate, one per backend and number of ranks."""

    def __init__(self, question: Question, rows: Sequence[EstimateRow]) -> None:
        self.question = question
        self.rows = list(rows)

    def as_json(self) -> dict[str, Any]:
        """The document of `harness estimate --json`: per rank, in bytes and seconds."""
        from harness.plan.estimate import document

        return document(self.question, self.rows)

    def to_frame(self) -> DataFrame:
        """Its rows as a table for pandas; None where no closed form answers."""
        from pandas import DataFrame

        return DataFrame(self.as_json()["rows"])

    def __str__(self) -> str:
        from harness.plan.estimate.table import estimate_lines

        return "\n".join(estimate_lines(self.question, self.rows))

    __repr__ = __str__


def estimate(
    model: str | None = None,
    *,
    config: str | PathLike[str] | None = None,
    backends: Sequence[str] = ("all",),
    world_size: int | Sequence[int] = 8,
    gpus_per_node: int = 8,
    gpu: str | None = None,
    fabric: str | None = None,
    hardware: str | PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Estimate:
    """Predict memory, communication, speed and cost of a job by strategy, in this process, without GPUs.

    `model`: a name of the catalogue ('llama-3.1-8b'), a folder with config.json, or None for the job's;
    `gpu`, `fabric`: names such as 'H100-80' and 'NDR400'; `hardware`: a YAML file with more of them;
    `settings`: values by dotted name. Raises HarnessError.
    """
    from harness.plan.device import with_training_defaults
    from harness.plan.estimate import question
    from harness.plan.estimate.row import estimate as estimated
    from harness.plan.hardware import load_hardware
    from harness.plan.job_model import job_model
    from harness.shipped import resolve

    known = load_hardware(None if hardware is None else Path(hardware))
    file = None if config is None else resolve(Path(config), "configs")
    experiment = load_experiment(file, assignments(settings)[1::2])
    device = None if gpu is None else known.device(gpu)
    planned = job_model(experiment.job(), model)
    experiment, remarks = with_training_defaults(planned, experiment, device)
    asked = question(
        planned,
        experiment,
        backends=backends,
        world_sizes=[world_size] if isinstance(world_size, int) else world_size,
        ranks_per_node=gpus_per_node,
        device=device,
        fabric=None if fabric is None else known.fabric(fabric),
        remarks=remarks,
    )
    return Estimate(asked, estimated(asked))
