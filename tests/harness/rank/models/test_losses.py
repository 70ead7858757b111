"""Losses of the tasks are sums over targets: those of micro-batches add up to that of the batch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.backends.base import Unsupported, World
from harness.backends.mesh import Mesh
from harness.errors import JobError
from harness.job.job import Job
from harness.rank.data import IGNORED, DataFacts
from harness.rank.models.changes import chunk_head
from harness.rank.models.losses import cut, divide_sequence, loss_function, loss_of_part, summed_cross_entropy
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


def test_the_loss_of_seq2seq_is_that_of_transformers_times_its_targets_also_over_micro_batches() -> None:
    job = Job.model_validate({"task": "seq2seq", "model": {"config": T5}, "data": ROWS})
    model = build_model(job, model_config(job, DataFacts(vocabulary_size=30)))
    compute, batch = loss_function(job, model), seq2seq_batch()
    loss = compute(model, batch)
    parts = [compute(model, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(4)]
    torch.testing.assert_close(torch.stack(parts).sum(), loss)
    model.config.decoder_start_token_id = 0  # what T5's own shift needs, and checkpoints bring
    mean = model(**batch).loss
    torch.testing.assert_close(loss, mean * 12)


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
    with pytest.raises(JobError, match=r"the loss of a batch is of shape \(5, 1\); it must be a scalar"):
        loss_function(own_job(tmp_path, "matrix"), model)(model, batch)


VOCABULARY = 11


def samples(length: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[2, length // 2 :] = IGNORED
    return {"tokens": tokens, "labels": labels}


class PerToken(nn.Module):
    """Logits of a token depend on it and its place alone, so that parts need no attention."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.head = nn.Linear(VOCABULARY, VOCABULARY)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).unsqueeze(0)
        logits: Tensor = self.head(self.table[input_ids] * (1 + position_ids.unsqueeze(-1)))
        return logits


def world(rank: int, parts: int) -> World:
    layout = Mesh.of(parts, {"data": None, "sequence": parts})
    return World(
        rank=rank, world_size=parts, local_rank=rank, ranks_per_node=parts, device="cpu", layout=layout
    )


@pytest.mark.parametrize(("length", "parts"), [(12, 2), (12, 3), (13, 2), (10, 4)])
def test_parts_of_the_loss_add_up_to_the_loss_of_the_whole_sample(length: int, parts: int) -> None:
    model, batch = PerToken(), samples(length)
    whole = summed_cross_entropy(model, batch)
    added = sum(loss_of_part(world(rank, parts))(model, batch) for rank in range(parts))
    torch.testing.assert_close(added, whole)


@pytest.mark.parametrize("chunk", [4, 100])
def test_parts_in_chunks_of_tokens_add_up_too(chunk: int) -> None:
    model, batch = PerToken(), samples(13)
    whole = summed_cross_entropy(model, batch)
    chunk_head(model, chunk)
    added = sum(loss_of_part(world(rank, 2), in_chunks=True)(model, batch) for rank in range(2))
    torch.testing.assert_close(added, whole)


def test_the_last_token_of_a_part_predicts_the_first_of_the_next_one() -> None:
    batch = samples(12)
    first, second = (cut(batch, index, 2) for index in range(2))
    assert torch.equal(first.targets[:, -1], batch["labels"][:, 6])
    assert torch.equal(second.tokens[:, 0], batch["tokens"][:, 6])
    assert second.positions.tolist() == [list(range(6, 12))]
    assert (second.targets[:, -1] == IGNORED).all()


def test_samples_of_an_odd_length_are_padded_where_nothing_is_predicted() -> None:
    last = cut(samples(13), 1, 2)
    assert last.tokens.shape == (3, 7)
    assert (last.targets[:, 5:] == IGNORED).all()


def job(length: int = 12) -> Job:
    return Job.model_validate({"data": {"sequence_length": length}})


@pytest.mark.parametrize(
    ("config", "length", "why"),
    [
        (None, 12, "Linear takes no position_ids"),
        ({"sliding_window": 8}, 12, "window of 8 tokens"),
        ({"max_position_embeddings": 13}, 13, "padded to 14 for 2 parts"),
    ],
)
def test_models_whose_samples_cannot_be_cut_are_refused(
    config: dict[str, int] | None, length: int, why: str
) -> None:
    model: nn.Module = nn.Linear(2, 2) if config is None else PerToken()
    model.config = SimpleNamespace(**(config or {}))  # type: ignore[assignment]
    with pytest.raises(Unsupported, match=why):
        divide_sequence(job(length), model, world(0, 2), summed_cross_entropy)


def test_where_no_rank_divides_samples_the_loss_is_the_job_s() -> None:
    alone = World(rank=0, world_size=2, local_rank=0, ranks_per_node=2, device="cpu")
    assert divide_sequence(job(), nn.Linear(2, 2), alone, summed_cross_entropy) is summed_cross_entropy
