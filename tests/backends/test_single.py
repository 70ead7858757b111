"""The reference whose sums are rounded in parts, or added in another order: equal but for that rounding."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from harness.backends.optimizer.gradients import fp32_norm
from harness.backends.refusals import Unsupported
from harness.backends.single import add_up_parts, reorder_backward
from harness.rank.data import DataFacts
from harness.rank.models.losses import summed_cross_entropy
from harness.rank.models.model import build_model, model_config
from tests.contract.cases import VOCABULARY, Case, contract_job, global_batches
from tests.harness.rank.small_models import alone

Trained = tuple[Tensor, dict[str, Tensor]]
"""Loss and gradients."""


def trained(
    change: Callable[[nn.Module], None] = lambda model: None, dtype: torch.dtype | None = None
) -> Trained:
    job = contract_job(Case(tied=False))
    assert isinstance(job.model.config, dict)
    biased = job.model.config | {"attention_bias": True, "mlp_bias": True}
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": biased})})
    model = build_model(job, model_config(job, DataFacts(vocabulary_size=VOCABULARY)))
    change(model)
    tokens, labels = next(global_batches())
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = summed_cross_entropy(model, {"tokens": tokens, "labels": labels})
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(one: Trained, other: Trained) -> float:
    """Between all gradients, relative to their norm."""
    whole, changed = one[1], other[1]
    assert whole.keys() == changed.keys()
    differences = sum((changed[n] - g).double().square().sum() for n, g in whole.items())
    return float((differences / sum(g.double().square().sum() for g in whole.values())) ** 0.5)


def in_parts(parts: int) -> Callable[[nn.Module], None]:
    return partial(add_up_parts, parts=parts)


def test_in_fp32_only_the_last_bits_differ() -> None:
    assert 0 < distance(trained(), trained(in_parts(2))) < 1e-6


def test_in_bf16_parts_are_rounded() -> None:
    # Between a tenth of bf16's relative spacing and ten spacings.
    rounded = distance(trained(dtype=torch.bfloat16), trained(in_parts(2), torch.bfloat16))
    assert 2**-8 / 10 < rounded < 10 * 2**-8


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(Unsupported, match="does not divide among 3"):
        trained(in_parts(3))


def test_another_order_changes_only_the_rounding_of_gradients() -> None:
    plain, reordered = trained(), trained(reorder_backward)
    assert torch.equal(plain[0], reordered[0])
    assert 0 < distance(plain, reordered) < 1e-6


def test_the_norm_of_a_complex_gradient_counts_both_of_its_parts() -> None:
    assert fp32_norm([torch.tensor([3 + 4j]), torch.tensor([12.0])]) == 13.0


def test_cast_weights_leave_batch_norm_in_fp32_as_fsdp1_does() -> None:
    seen: list[torch.dtype] = []

    def compute_loss(model: nn.Module, _: object) -> Tensor:
        output = model(torch.ones(4, 2, dtype=torch.bfloat16))
        seen.extend((output.dtype, *(parameter.dtype for parameter in model.parameters())))
        return output.sum()

    layers = nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False)
    engine = alone(lambda: nn.Sequential(*layers), compute_loss, "cast")
    engine.backward(engine.forward({}), last_micro_step=True)
    low = torch.bfloat16
    assert seen == [low, low, torch.float32, torch.float32, low]
