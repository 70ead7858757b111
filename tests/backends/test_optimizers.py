"""Implementations that are read back from live optimizers, and the step that stage 0 takes in vain."""

from importlib.util import find_spec

import pytest
import torch

from harness.backends.base import Unsupported
from harness.backends.fsdp.fsdp1 import refuse_fused
from harness.backends.optimizer.groups import optimizer_implementation, set_rates
from harness.backends.zero.engine import forget_dummy_step
from harness.job.job import OptimizerSection
from harness.rank.models.optimizer import build_optimizer, update_groups


def adamw(name: str, device: str = "cpu") -> torch.optim.AdamW:
    model = torch.nn.Linear(2, 2, device=device)
    section = OptimizerSection.model_validate({"implementation": name})
    return build_optimizer(model.named_parameters(), section, update_groups(model, section))


def read_back(optimizer: torch.optim.Optimizer) -> str | None:
    return optimizer_implementation(optimizer, optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("name", ["for-loop", "foreach", "fused"])
def test_what_was_asked_for_is_read_back(name: str) -> None:
    assert read_back(adamw(name)) == name


def test_torch_loops_on_the_cpu_by_default() -> None:
    assert read_back(adamw("default")) == "for-loop"


def test_the_default_follows_the_tensors_that_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import optimizer as torch_optimizer

    monkeypatch.setattr(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["meta"])
    assert read_back(adamw("default", "meta")) == "foreach"
    assert read_back(adamw("default")) == "for-loop"


def test_groups_that_differ_are_both_named() -> None:
    optimizer = adamw("foreach")
    optimizer.param_groups[1]["foreach"] = False
    assert read_back(optimizer) == "for-loop and foreach"


def test_another_optimizer_is_not_judged() -> None:
    parameters = list(torch.nn.Linear(2, 2).parameters())
    assert read_back(torch.optim.Adagrad(parameters, lr=0.1, foreach=True)) is None
    assert read_back(torch.optim.SGD(parameters, lr=0.1, foreach=True)) == "foreach"


def test_fsdp1_refuses_fused_under_its_loss_scaler() -> None:
    with pytest.raises(Unsupported, match=r"set optimizer.implementation to foreach or for-loop"):
        refuse_fused(adamw("fused"))
    refuse_fused(adamw("foreach"))


RATE = 1e-2
KINDS = {
    "adamw": {}, "adam": {"kind": "adam", "weight_decay": 0.1}, "sgd": {"kind": "sgd", "momentum": 0.9},
    "torchao": {"kind": "adamw-8bit"}, "bitsandbytes": {"kind": "adamw-8bit-bnb"},
}  # fmt: skip
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
