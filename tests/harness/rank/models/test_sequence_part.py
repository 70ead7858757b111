"""Samples cut along the sequence: no target is lost, and parts of the loss add up to the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.backends.base import Unsupported, World
from harness.backends.mesh import Mesh
from harness.job.job import Job
from harness.rank.data import IGNORED
from harness.rank.models.changes import chunk_head
from harness.rank.models.losses import cut, divide_sequence, loss_of_part, summed_cross_entropy

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


def job(**changes: object) -> Job:
    return Job.model_validate({"data": {"sequence_length": 12}} | changes)


def test_a_model_without_positions_is_refused() -> None:
    with pytest.raises(Unsupported, match="Linear takes no position_ids"):
        divide_sequence(job(), nn.Linear(2, 2), world(0, 2), summed_cross_entropy)


def test_a_window_of_attention_shorter_than_the_sample_is_refused() -> None:
    model = PerToken()
    model.config = type("Config", (), {"sliding_window": 8})()  # type: ignore[assignment]
    with pytest.raises(Unsupported, match="window of 8 tokens"):
        divide_sequence(job(), model, world(0, 2), summed_cross_entropy)


def test_positions_beyond_the_model_s_are_refused() -> None:
    model = PerToken()
    model.config = type("Config", (), {"max_position_embeddings": 13})()  # type: ignore[assignment]
    with pytest.raises(Unsupported, match="padded to 14 for 2 parts"):
        divide_sequence(
            Job.model_validate({"data": {"sequence_length": 13}}), model, world(0, 2), summed_cross_entropy
        )


def test_where_no_rank_divides_samples_the_loss_is_the_job_s() -> None:
    alone = World(rank=0, world_size=2, local_rank=0, ranks_per_node=2, device="cpu")
    assert divide_sequence(job(), nn.Linear(2, 2), alone, summed_cross_entropy) is summed_cross_entropy
