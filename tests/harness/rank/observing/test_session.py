import torch
from torch import nn

from harness.rank.observing.session import trains


def test_a_wrapper_in_evaluation_mode_around_a_model_that_trains_trains() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert trains(model)
    model.training = False
    assert trains(model)


def test_an_evaluation_does_not_train_whether_it_keeps_gradients_or_not() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    with torch.no_grad():
        assert not trains(model)
    assert not trains(model.eval())
