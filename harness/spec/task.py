"""What a job trains a model for, and which settings go together with it."""

from __future__ import annotations

from typing import Literal

from harness.spec.data import IMAGES, ROWS, DataSection
from harness.spec.loss import LossSection
from harness.spec.model import ModelSection

Task = Literal["causal-lm", "seq2seq", "classification", "custom"]
DEFAULT_TASK: Task = "causal-lm"


def require_fitting(task: Task, model: ModelSection, data: DataSection, loss: LossSection) -> None:
    """Raise ValueError for data or a loss that the task does not have."""
    own_data = data.factory is not None
    if task == "causal-lm" and data.source in IMAGES:
        raise ValueError(f"data.source '{data.source}' has no text; set task to classification")
    if task == "seq2seq" and not own_data:
        if data.is_packed or (data.source != "squad" and data.prompt_field is None):
            raise ValueError(
                f"task seq2seq needs an input for each text: data.source {', '.join(ROWS)} with "
                "data.prompt_field, squad, or data.factory"
            )
    if task == "classification" and not own_data and data.source not in (*ROWS, *IMAGES):
        raise ValueError(
            f"task classification needs labels, which data.source '{data.source}' has not: use "
            f"{', '.join((*ROWS, *IMAGES))}, or data.factory"
        )
    if task == "classification" and data.is_tokenized and data.is_packed:
        raise ValueError("task classification is one sample per row; leave `data.packed` out")
    if task == "custom" and not own_data:
        raise ValueError("task custom needs `data.factory`: nothing else says what its samples are")
    if data.target_length is not None and task != "seq2seq":
        raise ValueError("`data.target_length` is of task seq2seq; it would be ignored")
    if (
        task != "custom"
        and loss.factory is None
        and loss.model_copy(update={"chunk_tokens": None}) != LossSection()
    ):
        raise ValueError(f"`loss` of task {task} is the task's own; give `loss.factory`, or leave it out")
    if task != "custom" and loss.targets != "samples":
        raise ValueError(f"`loss.targets` is of task custom; task {task} has its own")
    if task == "custom" and model.factory is None and loss.factory is None:
        raise ValueError("task custom needs `model.factory`, `loss.factory` or both")
