from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.rank.live.model_watch import PassWatch, depends_on_mode, largest_dropout


class Model(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 4), nn.Dropout(dropout), nn.Linear(4, 1)

    def forward(self, points: Tensor) -> Tensor:
        hidden = checkpoint(self.first, points, use_reentrant=False)
        return self.second(self.drop(hidden)).sum()


def test_recomputation_is_no_pass() -> None:
    model = Model()
    watch = PassWatch(model)
    for _ in range(2):
        loss = model(torch.ones(2, 4))
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


def test_dropout_of_a_teacher_that_no_training_pass_trains_does_not_count() -> None:
    model = Model()
    watch = PassWatch(model)
    model.drop.eval()
    watch.look(model)
    assert watch.never_trains() == {"drop"}
    assert largest_dropout(model, watch.never_trains()) == 0.0
    assert largest_dropout(model) == 0.5


def test_dropout_that_rests_in_some_training_passes_counts() -> None:
    model = Model()
    watch = PassWatch(model)
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


def test_a_copy_of_the_model_counts_as_the_model() -> None:
    from copy import deepcopy

    model = Model()
    watch = PassWatch(model)
    deepcopy(model)(torch.ones(2, 4))
    assert watch.passes == (1, 0)
