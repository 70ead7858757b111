"""After the step on zero gradients that stage 0 takes while it sets up, an optimizer is as new."""

from importlib.util import find_spec

import pytest
import torch

from harness.backends.optimizer.groups import set_rates
from harness.backends.zero.engine import forget_dummy_step
from harness.job.job import OptimizerSection
from harness.rank.models.optimizer import build_optimizer, update_groups

RATE = 1e-2
KINDS = {
    "adamw": {},
    "adam": {"kind": "adam", "weight_decay": 0.1},
    "sgd": {"kind": "sgd", "momentum": 0.9},
    "torchao": {"kind": "adamw-8bit"},
    "bitsandbytes": {"kind": "adamw-8bit-bnb"},
}
NEEDS = {"torchao": "torchao", "bitsandbytes": "bitsandbytes"}


def updated(settings: dict[str, object], *, is_forgetting: bool) -> torch.Tensor:
    """Weights of 64 x 128 after three updates; before them a step on zero gradients that is forgotten."""
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 64, bias=False)
    section = OptimizerSection.model_validate({"learning_rate": RATE, **settings})
    optimizer = build_optimizer(model.named_parameters(), section, update_groups(model, section))
    if is_forgetting:
        set_rates(optimizer, 0.0)
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        forget_dummy_step(optimizer)
    set_rates(optimizer, RATE)
    for seed in range(3):
        model.weight.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_a_new_optimizer(kind: str) -> None:
    if kind in NEEDS and find_spec(NEEDS[kind]) is None:
        pytest.skip(f"{NEEDS[kind]} is not installed")
    found, expected = (updated(KINDS[kind], is_forgetting=forgets) for forgets in (True, False))
    assert torch.equal(found, expected)
