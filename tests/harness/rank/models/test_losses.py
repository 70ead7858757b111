"""Losses of the tasks are sums over targets: those of micro-batches add up to that of the batch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.errors import JobError
from harness.job.job import Job
from harness.rank.data import IGNORED, DataFacts
from harness.rank.models.losses import loss_function
from harness.rank.models.model import build_model, model_config

T5 = {"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
ROWS = {"source": "jsonl", "path": "rows.jsonl", "prompt_field": "question", "text_field": "answer"}
OWN = """\
from torch import nn


def mean():
    return lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"])


def matrix():
    return lambda model, batch: model(batch["x"])
"""


def seq2seq_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 30, (4, 6), generator=generator)
    for row, length in enumerate((6, 1, 3, 2)):
        labels[row, length:] = IGNORED
    inputs = torch.randint(0, 30, (4, 5), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


def test_the_loss_of_seq2seq_is_that_of_transformers_times_its_targets() -> None:
    job = Job.model_validate({"task": "seq2seq", "model": {"config": T5}, "data": ROWS})
    model = build_model(job, model_config(job, DataFacts(vocabulary_size=30)))
    batch = seq2seq_batch()
    loss = loss_function(job, model)(model, batch)
    model.config.decoder_start_token_id = 0  # what T5's own shift needs, and checkpoints bring
    mean = model(**batch).loss
    torch.testing.assert_close(loss, mean * 12)


def test_uneven_targets_add_up_over_micro_batches() -> None:
    job = Job.model_validate({"task": "seq2seq", "model": {"config": T5}, "data": ROWS})
    model = build_model(job, model_config(job, DataFacts(vocabulary_size=30)))
    compute, batch = loss_function(job, model), seq2seq_batch()
    parts = [compute(model, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(4)]
    torch.testing.assert_close(torch.stack(parts).sum(), compute(model, batch))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(pixel_values))


def test_classes_of_samples_that_are_masked_count_nothing() -> None:
    job = Job.model_validate({"task": "classification", "data": {"source": "synthetic-images"}})
    model, values = Classifier(), torch.rand(3, 3)
    labels = torch.tensor([1, 0, IGNORED])
    loss = loss_function(job, model)(model, {"pixel_values": values, "labels": labels})
    expected = functional.cross_entropy(model(values[:2]).logits, labels[:2], reduction="sum")
    torch.testing.assert_close(loss, expected)


def own_job(tmp_path: Path, function: str, **loss: str) -> Job:
    path = tmp_path / f"losses_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(OWN)
    data = {"factory": f"{path}:mean"}
    return Job.model_validate(
        {"task": "custom", "data": data, "loss": {"factory": f"{path}:{function}", **loss}}
    )


def test_a_mean_of_a_loss_of_ones_own_becomes_a_sum(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    batch = {"x": torch.rand(5, 3), "y": torch.rand(5, 1)}
    mean = functional.mse_loss(model(batch["x"]), batch["y"])
    found = loss_function(own_job(tmp_path, "mean"), model)(model, batch)
    torch.testing.assert_close(found, 5 * mean)
    summed = loss_function(own_job(tmp_path, "mean", reduction="sum"), model)(model, batch)
    torch.testing.assert_close(summed, mean)


def test_a_loss_that_is_no_scalar_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    compute = loss_function(own_job(tmp_path, "matrix"), model)
    with pytest.raises(JobError, match=r"the loss of a batch is of shape \(5, 1\); it must be a scalar"):
        compute(model, {"x": torch.rand(5, 3)})
