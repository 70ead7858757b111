"""What modules show of a step by themselves."""

import torch
from torch import nn

from harness.rank.module_watch import ModuleWatch


def test_modules_without_a_gradient_are_named_and_the_dtype_is_that_of_outputs() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    watch = ModuleWatch(model)
    watch.start()
    with torch.autocast("cpu", torch.bfloat16):
        loss = (
            model["used"](model["frozen"](torch.ones(1, 2))).sum()
            + model["idle"](torch.ones(1, 2)).detach().sum()
        )
    loss.backward()
    assert watch.stop() == ["idle"]
    assert watch.compute_dtype == "bfloat16"
    assert watch.stop() is None
    assert not any(module._forward_hooks for module in model.modules())


def test_nothing_is_said_where_no_module_was_seen_to_get_a_gradient() -> None:
    watch = ModuleWatch(nn.Linear(2, 2))
    watch.start()
    assert watch.stop() is None
    assert watch.compute_dtype is None
