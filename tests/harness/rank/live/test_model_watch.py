"""What modules show of a step by themselves."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.rank.live import model_watch
from harness.rank.live.model_watch import ModuleWatch, PassWatch, depends_on_mode, largest_dropout


class Model(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 4), nn.Dropout(dropout), nn.Linear(4, 1)

    def forward(self, points: Tensor) -> Tensor:
        hidden = checkpoint(self.first, points, use_reentrant=False)
        return self.second(self.drop(hidden)).sum()


def test_recomputation_is_no_pass_of_the_model_or_of_a_copy() -> None:
    model = Model()
    watch = PassWatch(model)
    for called in (model, deepcopy(model)):  # a copy counts as the model
        loss = called(torch.ones(2, 4))
        watch.computed(loss)
        (loss * 3).backward()
    assert watch.passes == (2, 2)
    watch.begin_step()
    assert watch.passes == (0, 0)


def test_a_second_backward_pass_counts_and_one_without_gradients_as_forward_alone() -> None:
    model = Model()
    watch = PassWatch(model)
    with torch.no_grad():
        watch.computed(model(torch.ones(2, 4)))
    loss = model(torch.ones(2, 4))
    watch.computed(loss)
    loss.backward(retain_graph=True)
    loss.backward()
    assert watch.passes == (2, 2)


def test_dropout_counts_unless_it_rests_in_every_training_pass() -> None:
    model = Model()
    watch = PassWatch(model)
    model.drop.eval()  # as of a teacher
    watch.look(model)
    assert watch.never_trains() == {"drop"}
    assert largest_dropout(model, watch.never_trains()) == 0.0
    assert largest_dropout(model) == 0.5
    watch = PassWatch(model.train())
    watch.look(model)
    model.eval()
    watch.look(model)
    assert watch.never_trains() == set()


def test_modes_are_named_where_they_do_not_fit_the_pass() -> None:
    model = Model()
    watch = PassWatch(model)
    watch.look(model)
    assert watch.in_other_mode(trains=True) == []
    assert watch.in_other_mode(trains=False) is None
    model.eval()
    watch.look(model)
    assert watch.in_other_mode(trains=True) == ["drop"]
    with torch.no_grad():
        watch.look(model)
        assert watch.in_other_mode(trains=False) == []
        model.train()
        watch.look(model)
    assert watch.in_other_mode(trains=False) == ["drop"]


def test_only_modules_whose_forward_asks_for_it_depend_on_their_mode() -> None:
    assert not depends_on_mode(nn.Linear(2, 2))
    assert not depends_on_mode(nn.Dropout(0.0))
    assert depends_on_mode(nn.Dropout(0.1))
    assert depends_on_mode(nn.BatchNorm1d(2))


def model(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})


def step(watch: ModuleWatch, modules: nn.ModuleDict, *used: str, closely: bool = False) -> list[str] | None:
    if closely:
        watch.start()
    sum(modules[name](torch.ones(1, 2)).sum() for name in used).backward()
    found = watch.end_step()
    watch.stop()
    return found


def test_parameters_without_a_gradient_are_named_and_layers_of_another_dtype_than_most() -> None:
    modules = model("used", "idle", "frozen", "wide")
    for name in ("frozen", "wide"):
        modules[name].requires_grad_(False)
    watch = ModuleWatch(modules)
    watch.start()
    assert (watch.end_step(), watch.compute_dtype) == (None, None), "nothing was seen"
    with torch.autocast("cpu", torch.bfloat16):
        hidden = modules["used"](modules["frozen"](torch.ones(1, 2)))
        (hidden.sum() + modules["idle"](torch.ones(1, 2)).detach().sum()).backward()
        with torch.autocast("cpu", enabled=False):
            modules["wide"](hidden.float())
    assert watch.end_step() == ["idle.weight"]
    watch.stop()
    assert watch.compute_dtype == "bfloat16"
    assert watch.products_otherwise == {"float32": ["wide"]}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules.modules())


def test_modules_with_parameters_are_noted_as_they_begin_before_other_hooks() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    seen: list[str] = []
    model[2].register_forward_pre_hook(lambda *_: seen.append("of a library"), prepend=True)
    watch = ModuleWatch(model, seen.append)
    watch.start()
    model(torch.ones(1, 2))
    assert seen == ["1", "1.0", "2", "of a library"]


def test_a_gradient_that_goes_missing_later_is_named_in_its_step() -> None:
    modules = model("a", "b")
    watch = ModuleWatch(modules)
    assert [step(watch, modules, "a", "b", closely=n < 2) for n in range(5)] == [[], None, None, None, None]
    assert step(watch, modules, "a") == ["b.weight"]
    assert step(watch, modules, "a") is None
    assert step(watch, modules, "a", "b") == []
    assert watch.end_step() == ["a.weight", "b.weight"]


def test_tensors_that_are_made_anew_in_each_step_are_known_in_the_first_steps_only() -> None:
    modules = model("a")
    watch = ModuleWatch(modules)
    weight = modules["a"].weight
    del modules["a"].weight
    found = []
    for number in range(3):
        modules["a"].weight = 2 * weight
        found.append(step(watch, modules, "a", closely=number < 2))
    assert found == [[], None, None]
    assert watch.is_over


def test_what_changes_in_every_step_is_noted_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_watch, "MOST_NAMES", 2)
    modules = model("a", "b")
    watch = ModuleWatch(modules)
    found = [step(watch, modules, *used, closely=n < 2) for n, used in enumerate(("ab", "ab", "a", "b", "a"))]
    assert found == [[], None, ["b.weight"], ["a.weight"], None]
    assert watch.is_over
    assert step(watch, modules, "b") is None
    assert not any(parameter._backward_hooks for parameter in modules.parameters())


def test_what_reaches_a_loss_is_known_of_a_step() -> None:
    model = nn.Linear(2, 1)
    watch = PassWatch(model)
    assert watch.loss_gradients is None
    for factor in (0.0, 1.5):
        loss = model(torch.ones(1, 2)).sum()
        watch.computed(loss)
        (loss * factor).backward()
    assert watch.loss_gradients == [0.0, 1.5]
    watch.begin_step()
    assert watch.loss_gradients is None
