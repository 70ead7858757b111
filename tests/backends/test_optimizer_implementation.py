from __future__ import annotations

import pytest
import torch

from harness.backends.base import Unsupported
from harness.backends.fsdp.fsdp1 import refuse_fused
from harness.backends.optimizer.groups import optimizer_implementation
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
