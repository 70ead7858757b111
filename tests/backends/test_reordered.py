"""The reference whose backward pass adds in another order: equal losses, gradients equal up to rounding."""

from __future__ import annotations

import torch

from harness.backends.optimizer.gradients import fp32_norm
from harness.backends.single import reorder_backward
from harness.rank.data import DataFacts
from harness.rank.models.losses import summed_cross_entropy
from harness.rank.models.model import build_model, model_config
from tests.contract.cases import VOCABULARY, Case, contract_job, global_batches


def loss_and_gradient(*, reordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    job = contract_job(Case(accumulation_steps=1, clipping=None, tied=False))
    model = build_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))
    if reordered:
        reorder_backward(model)
    tokens, labels = next(global_batches())
    loss = summed_cross_entropy(model, {"tokens": tokens, "labels": labels})
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_only_the_rounding_of_gradients_differs() -> None:
    loss, gradient = loss_and_gradient(reordered=False)
    other_loss, other_gradient = loss_and_gradient(reordered=True)
    assert torch.equal(loss, other_loss)
    difference = float((gradient - other_gradient).double().norm() / gradient.double().norm())
    assert 0 < difference < 1e-6


def test_the_norm_of_a_complex_gradient_counts_both_of_its_parts() -> None:
    assert fp32_norm([torch.tensor([3 + 4j]), torch.tensor([12.0])]) == 13.0
