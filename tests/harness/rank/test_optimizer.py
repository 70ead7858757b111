import math

import pytest
import torch
from torch import nn

from harness.job.optimizer import OptimizerSection, ScheduleSection
from harness.rank.models.optimizer import build_optimizer, learning_rate, update_groups


def rates(steps: int, **schedule: object) -> list[float]:
    optimizer = OptimizerSection(learning_rate=1.0)
    return [learning_rate(step, steps, optimizer, ScheduleSection(**schedule)) for step in range(steps)]


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warmup_rises_linearly_to_the_peak(kind: str) -> None:
    assert rates(10, kind=kind, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays_at_the_peak() -> None:
    assert rates(5, kind="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_linear_falls_evenly_to_the_final_fraction() -> None:
    expected = [1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates(5, kind="linear", warmup_steps=0, final_fraction=0.2) == pytest.approx(expected)


def test_cosine_is_halfway_in_the_middle() -> None:
    found = rates(5, kind="cosine", warmup_steps=0, final_fraction=0.0)
    quarter = (1 + math.cos(math.pi / 4)) / 2
    assert found == pytest.approx([1.0, quarter, 0.5, 1 - quarter, 0.0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_last_step_has_the_final_fraction(kind: str, warmup: int) -> None:
    assert rates(20, kind=kind, warmup_steps=warmup, final_fraction=0.1)[-1] == pytest.approx(0.1)


def test_peak_scales_the_schedule() -> None:
    section = OptimizerSection(learning_rate=3e-4)
    assert learning_rate(0, 10, section, ScheduleSection(warmup_steps=2)) == pytest.approx(1.5e-4)


def test_warmup_longer_than_the_training_only_rises() -> None:
    assert rates(3, warmup_steps=6) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_single_step_has_a_learning_rate() -> None:
    assert rates(1, warmup_steps=0) == [1.0]


def test_matrices_decay_and_vectors_do_not() -> None:
    assert update_groups(small_model(), OptimizerSection())[0].names == {"0.weight", "2.weight"}


def test_everything_decays_where_asked() -> None:
    model = small_model()
    assert (
        update_groups(model, OptimizerSection(decay="all"))[0].names == dict(model.named_parameters()).keys()
    )


def test_every_parameter_is_in_one_group_with_its_decay() -> None:
    model, section = small_model(), OptimizerSection(weight_decay=0.3)
    optimizer = build_optimizer(model.named_parameters(), section, update_groups(model, section))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert found == {
        "0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.3
    }  # fmt: skip


def test_empty_group_is_left_out() -> None:
    model, section = small_model(), OptimizerSection(decay="all")
    optimizer = build_optimizer(model.named_parameters(), section, update_groups(model, section))
    assert len(optimizer.param_groups) == 1


def test_frozen_weights_are_not_given_to_the_optimizer() -> None:
    model, section = small_model(), OptimizerSection()
    frozen = frozenset({"0.weight", "1.bias"})
    optimizer = build_optimizer(model.named_parameters(), section, update_groups(model, section), frozen)
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert {name for name, p in model.named_parameters() if id(p) not in given} == frozen


def test_constants_reach_the_optimizer() -> None:
    section = OptimizerSection(learning_rate=2e-3, beta1=0.8, beta2=0.9, epsilon=1e-6)
    optimizer = build_optimizer(small_model().named_parameters(), section, ())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.9), 1e-6)
    assert group["amsgrad"] is False
    assert isinstance(optimizer, torch.optim.AdamW)
