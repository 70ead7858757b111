"""Which modules run, how often, and where gradients go, found on the meta device."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.job.job import Job
from harness.rank.models.description import DEPENDS_ON_DATA, REGULAR, ModuleUses, find_module_uses

IDS = {"input_ids": torch.tensor([[1, 2, 3], [3, 2, 1]]), "labels": torch.tensor([0, 1])}


class Shared(nn.Module):
    """A table that two modules look things up in and a third multiplies with, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Embedding(4, 4)
        self.first, self.second = nn.Embedding(4, 4), nn.Embedding(4, 4)
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        for module in (self.first, self.second, self.last):
            module.weight = self.unused.weight
        self.seen: list[Tensor] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.once(self.first(input_ids) + self.second(input_ids))
        self.seen.append(hidden)
        return self.last(self.twice(self.twice(hidden)))[:, 0]


def job(task: str = "classification") -> Job:
    return Job.model_validate({
        "task": task, "model": {"factory": "mine:model"}, "data": {"factory": "mine:data"}
    })  # fmt: skip


def traced(model: nn.Module, task: str = "classification") -> ModuleUses:
    return find_module_uses(job(task), model, None, IDS)


def test_uses_are_in_the_order_of_the_forward_pass_with_what_the_backward_pass_sees() -> None:
    model = Shared()
    twice = ["earlier run of its module", "inputs with gradient"]
    assert traced(model).uses == {
        "unused.weight": ["inputs without gradient", "inputs without gradient", "inputs with gradient"],
        "twice.weight": twice,
        "twice.bias": twice,
    }
    assert model.seen == []  # a copy ran
    assert not any(parameter.is_meta for parameter in model.parameters())


class Weighed(nn.Module):
    """Returns a weight as it is, for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(input_ids)[:, 0], self.weight


def test_a_parameter_that_its_module_returns_is_known_as_such() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        hidden, weight = model(batch["input_ids"])
        return (hidden * weight.exp()).sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.rank.models.description.loss_function", lambda *_: loss)
        found = traced(Weighed())
    assert found.uses == {"weight": ["returned by its module"]}
    assert found.read_outside == ["weight"]


def clamp(model: Any) -> None:
    with torch.no_grad():
        model[1].weight.clamp_(-0.1, 0.1)


def clamp_data(model: Any) -> None:
    model[1].weight.data.clamp_(-0.1, 0.1)


def give_data(model: Any) -> None:
    model[1].weight.data = model[1].weight.data / 2


def read_only(model: Any) -> None:
    model[1].weight.detach().clone().clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    ("change", "names"),
    [(clamp, ["1.weight"]), (clamp_data, ["1.weight"]), (give_data, ["1.weight"]), (read_only, [])],
)
def test_weights_that_passes_write_to_are_named(change: Callable[[Any], None], names: list[str]) -> None:
    model = Chain()
    model.before = lambda _: change(running[0])
    running: list[nn.Module] = []
    model.register_forward_pre_hook(lambda module, _: running.insert(0, module))
    assert traced(model).changed_in_passes == names


class Lends(nn.Module):
    """Returns a weight of another module, and one of its own in a container within another."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, input_ids: Tensor) -> Any:
        return self.table(input_ids)[:, 0], self.table.weight, [self.weight]


def test_what_another_module_returns_or_a_container_hides_is_read_elsewhere() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        hidden, table, (weight,) = model(batch["input_ids"])
        return (hidden * weight.exp()).sum() + table.sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.rank.models.description.loss_function", lambda *_: loss)
        found = traced(Lends())
    elsewhere = ["read by another module"]
    assert found.uses == {"table.weight": elsewhere, "weight": elsewhere}


def test_frozen_weights_have_no_backward_pass() -> None:
    model = Shared()
    for module in (model.unused, model.once):
        module.requires_grad_(False)
    found = traced(model).uses
    assert found is not None
    assert found["unused.weight"] == ["forward only", "forward only", "inputs with gradient"]


def test_a_module_that_does_not_run_has_no_use() -> None:
    model = Shared()
    model.spare = nn.Linear(2, 2)
    assert traced(model).uses["spare.weight"] == []  # type: ignore[index]


class Chain(nn.Sequential):
    """Layers in a row, after something that a test does with the inputs."""

    def __init__(self, before: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 2))
        self.before = before

    def forward(self, input_ids: Tensor) -> Tensor:
        self.before(input_ids)
        return super().forward(input_ids.float())


def test_other_models_are_regular() -> None:
    assert traced(Chain()) == REGULAR
    assert find_module_uses(Job(), Shared(), None, None) == REGULAR


def penalised(coefficient: float = 1.0) -> Callable[..., Tensor]:
    """A loss with a penalty on weights, as `loss.factory`."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            sum(parameter.norm() for parameter in model.parameters())  # for a log, of no matter
        return model(batch["input_ids"]).sum() + coefficient * model[1].weight.square().sum()

    return loss


def test_weights_that_the_loss_reads_beside_the_model_are_named() -> None:
    loss = {"factory": f"{__name__}:penalised", "reduction": "mean", "targets": "samples"}
    own = job("custom").model_dump() | {"loss": loss}
    found = find_module_uses(Job.model_validate(own), Chain(), None, IDS)
    assert (found.read_outside, found.unreached, found.uses) == (["1.weight"], [], {})


@pytest.mark.parametrize("before", [
    lambda x: x.tolist(), lambda x: 1 / 0, lambda x: torch.rand([]), lambda x: torch.empty(1).uniform_(),
    lambda x: random.random(), lambda x: numpy.random.uniform(0, 1),
])  # fmt: skip
def test_nothing_is_known_where_values_or_random_numbers_may_decide_what_runs(
    before: Callable[[Tensor], Any],
) -> None:
    model = Chain(before)
    states = torch.get_rng_state(), random.getstate()
    assert traced(model) == DEPENDS_ON_DATA
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


class Headed(Chain):
    """A frozen first layer, and a head that the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = nn.Linear(2, 2)
        self[0].requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self[1](self[0](input_ids.float()))
        self.dropped(hidden)
        return hidden


def test_modules_without_a_backward_pass_and_parameters_without_gradient_are_named() -> None:
    model = Headed()
    found = traced(model)
    assert found.unreached == ["dropped.weight", "dropped.bias"]
    assert found.without_gradient == ["0", "dropped"]


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(4, 4), nn.Linear(4, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return checkpoint(self.last, self.table(input_ids), use_reentrant=False)[:, 0]


def test_how_often_weights_are_gathered_is_unknown_where_the_model_recomputes_by_itself() -> None:
    found = traced(Recomputing())
    assert found.uses is None
    assert found.unreached == []


class Reentrant(Recomputing):
    _no_split_modules = ["Linear"]

    def forward(self, input_ids: Tensor) -> Tensor:
        return checkpoint(self.last, self.table(input_ids), use_reentrant=True)[:, 0]


def test_of_blocks_that_run_without_gradients_first_calls_are_unknown_and_gradients_known() -> None:
    found = traced(Reentrant())
    assert found.unit_calls is None
    assert (found.without_gradient, found.unreached) == ([], [])


class Alternating(nn.Module):
    """Each pass runs another layer than the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.passes = nn.ModuleList(nn.Linear(3, 2) for _ in range(3)), 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.passes += 1
        return self.layers[self.passes % 3](input_ids.float())


def test_of_a_model_that_counts_its_passes_nothing_is_known() -> None:
    assert traced(Alternating()) == DEPENDS_ON_DATA


class EvaluatedElsewhere(nn.Module):
    """A layer that evaluations alone run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        found = self.first(input_ids.float())
        return found if self.training else self.head(found)


def test_evaluations_that_run_other_modules_are_told() -> None:
    found = traced(EvaluatedElsewhere())
    assert (found.evaluates_alike, found.unreached) == (False, ["head.weight", "head.bias"])
