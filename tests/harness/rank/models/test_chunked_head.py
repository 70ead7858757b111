import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.errors import JobError
from harness.job.job import Job
from harness.rank.data import DataFacts
from harness.rank.models.changes import chunk_head
from harness.rank.models.losses import loss_function
from harness.rank.models.model import build_model, model_config
from tests.harness.rank.models.test_model import SMALL

VOCABULARY, LENGTH, SAMPLES = 4096, 24, 2


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that an operator returns, parameters' gradients left out."""

    def __init__(self, besides: set[int]) -> None:
        super().__init__()
        self._besides = besides
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() not in self._besides:
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def step(chunk_tokens: int | None, **config: object) -> tuple[float, list[torch.Tensor], int]:
    """Loss, gradients, and bytes of the largest activation of a step."""
    job = Job.model_validate(
        {
            "model": {"config": SMALL | {"vocab_size": VOCABULARY} | config},
            "data": {"sequence_length": LENGTH},
            "loss": {"chunk_tokens": chunk_tokens},
        }
    )
    model = build_model(job, model_config(job, DataFacts(vocabulary_size=257)))
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = tokens.clone()
    labels[1, 9:] = -100
    with LargestTensor({p.numel() for p in model.parameters()}) as largest:
        loss = loss_function(job, model)(model, {"tokens": tokens, "labels": labels})
        loss.backward()
    return loss.item(), [p.grad for p in model.parameters()], largest.bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.costly
def test_loss_and_gradients_are_those_of_all_logits(chunk: int, tied: bool) -> None:
    loss, gradients, _ = step(None, tie_word_embeddings=tied)
    chunked, others, _ = step(chunk, tie_word_embeddings=tied)
    assert chunked == pytest.approx(loss, rel=1e-6)
    for one, other in zip(gradients, others, strict=True):
        # Sums over tokens in another order.
        assert (one - other).norm() <= SAMPLES * LENGTH * torch.finfo(torch.float32).eps * one.norm()


def test_the_largest_tensor_is_the_logits_of_one_chunk() -> None:
    assert step(None)[2] == SAMPLES * LENGTH * VOCABULARY * 4
    assert step(7)[2] == 7 * VOCABULARY * 4


def test_logits_that_the_model_changes_are_refused() -> None:
    job = {"model_type": "gemma2", "head_dim": 16, "num_hidden_layers": 1}
    with pytest.raises(JobError, match="changes its logits after the output layer"):
        step(7, **job)


def test_a_head_that_is_not_linear_is_refused() -> None:
    with pytest.raises(JobError, match=r"needs an output layer that is a plain nn\.Linear; Linear has none"):
        chunk_head(nn.Linear(2, 2), 4)
