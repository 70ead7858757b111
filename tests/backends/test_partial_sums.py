"""The reference whose sums are added up from rounded parts: equal but for the rounding of those parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.backends.refusals import Unsupported
from harness.backends.single import add_up_parts
from harness.rank.data import DataFacts
from harness.rank.models.losses import summed_cross_entropy
from harness.rank.models.model import build_model, model_config
from tests.contract.cases import VOCABULARY, Case, contract_job, global_batches


def loss_and_gradients(parts: int | None, dtype: torch.dtype | None) -> tuple[float, dict[str, Tensor]]:
    job = contract_job(Case(accumulation_steps=1, clipping=None, tied=False))
    assert isinstance(job.model.config, dict)
    biased = job.model.config | {"attention_bias": True, "mlp_bias": True}
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": biased})})
    model = build_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))
    if parts is not None:
        add_up_parts(model, parts)
    tokens, labels = next(global_batches())
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = summed_cross_entropy(model, {"tokens": tokens, "labels": labels})
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(parts: int, dtype: torch.dtype | None) -> float:
    """Of all gradients from those of whole sums, relative to their norm."""
    _, whole = loss_and_gradients(None, dtype)
    _, other = loss_and_gradients(parts, dtype)
    assert whole.keys() == other.keys()
    squares = [((other[n] - g).double().square().sum(), g.double().square().sum()) for n, g in whole.items()]
    differences, sizes = zip(*squares, strict=True)
    return float((sum(differences) / sum(sizes)) ** 0.5)


def test_in_fp32_only_the_last_bits_differ() -> None:
    assert 0 < distance(2, None) < 1e-6


def test_in_bf16_parts_are_rounded() -> None:
    # Between a tenth of bf16's relative spacing and ten spacings.
    assert 2**-8 / 10 < distance(2, torch.bfloat16) < 10 * 2**-8


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(Unsupported, match="does not divide among 3"):
        loss_and_gradients(3, None)
