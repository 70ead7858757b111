"""The optimizer that is Muon for matrices of blocks and AdamW for the rest."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from harness.backends.registry import strategy_of
from harness.job.job import OptimizerSection, ScheduleSection
from harness.rank.models.optimizer import (
    MOMENTUM_KEY,
    OwnUpdate,
    build_muon,
    build_optimizer,
    learning_rate,
    orthogonalised,
    orthogonalised_in_parts,
    try_own,
    update_groups,
)


def rates(steps: int, **schedule: object) -> list[float]:
    optimizer = OptimizerSection(learning_rate=1.0)
    return [learning_rate(step, steps, optimizer, ScheduleSection(**schedule)) for step in range(steps)]


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warmup_rises_linearly_to_the_peak(kind: str) -> None:
    assert rates(10, kind=kind, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


QUARTER = (1 + math.cos(math.pi / 4)) / 2


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "constant", "warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"kind": "linear", "warmup_steps": 0, "final_fraction": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        (
            {"kind": "cosine", "warmup_steps": 0, "final_fraction": 0.0},
            [1.0, QUARTER, 0.5, 1 - QUARTER, 0.0],
        ),
        ({"warmup_steps": 6}, [1 / 6, 2 / 6, 3 / 6]),  # longer than the training
        ({"warmup_steps": 0}, [1.0]),
    ],
)
def test_rates_follow_the_shape_after_the_warmup(schedule: dict[str, object], expected: list[float]) -> None:
    assert rates(len(expected), **schedule) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_last_step_has_the_final_fraction_of_the_peak(kind: str, warmup: int) -> None:
    schedule = ScheduleSection(kind=kind, warmup_steps=warmup, final_fraction=0.1)
    last = learning_rate(19, 20, OptimizerSection(learning_rate=3e-4), schedule)
    assert last == pytest.approx(3e-5)


def test_every_parameter_is_in_one_group_with_its_decay_and_none_is_empty() -> None:
    """Matrices decay and vectors do not, unless all are asked to."""
    for decay, vectors, count in (("matrices", 0.0, 2), ("all", 0.3, 1)):
        model, section = small_model(), OptimizerSection(weight_decay=0.3, decay=decay)
        optimizer = build_optimizer(model.named_parameters(), section, update_groups(model, section))
        of = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        assert {name: of[id(p)] for name, p in model.named_parameters()} == {
            "0.weight": 0.3, "0.bias": vectors, "1.weight": vectors, "1.bias": vectors, "2.weight": 0.3,
        }  # fmt: skip
        assert len(optimizer.param_groups) == count


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


class ByNorm(torch.optim.SGD):
    """Scales what it does by norms: of each parameter, as LAMB and LARS do, or of all gradients."""

    def __init__(self, groups: Any, *, of_all: bool) -> None:
        super().__init__(groups)
        self.of_all = of_all

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        whole = torch.stack([p.grad.norm() for p in held]).norm()
        for parameter in held:
            factor = 1 / whole if self.of_all else parameter.norm() / parameter.grad.norm()
            parameter.sub_(1e-3 * factor * parameter.grad)


def own(groups: Iterable[dict[str, Any]], name: str) -> torch.optim.Optimizer:
    """The factory of the optimizers that are tried."""
    if name == "transformers.Adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, scale_parameter=False, relative_step=False)
    if name == "drawing":
        return Drawing(groups, lr=1e-3)
    if name.startswith("by "):
        return ByNorm(groups, of_all=name == "by all")
    if name == "LBFGS":
        return torch.optim.LBFGS([p for group in groups for p in group["params"]])
    return getattr(torch.optim, name)(groups)


def tried(name: str) -> OwnUpdate | None:
    return try_own(OptimizerSection(factory=f"{__name__}:own", arguments={"name": name}))


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "SGD", "Adamax", "NAdam", "Adagrad", "Rprop"])
def test_what_updates_each_element_on_its_own_moves_a_part_as_in_the_whole(name: str) -> None:
    before = torch.random.get_rng_state()
    found = tried(name)
    assert (found.of_part, found.needs_closure) == (0.0, False)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["Adafactor", "transformers.Adafactor", "by parameter", "by all"])
def test_what_looks_at_shapes_or_norms_moves_a_part_otherwise(name: str) -> None:
    assert tried(name).of_part > 1e-3
    assert tried(name).why_not(strategy_of("zero2")) is None, "it runs, and is told from a defect"


class Drawing(torch.optim.SGD):
    """Adds noise to each update, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1e-3 * torch.randn_like(parameter))


def test_an_update_that_draws_or_takes_no_flat_part_says_nothing_of_parts() -> None:
    before = torch.random.get_rng_state()
    found = tried("drawing")
    assert (found.of_part, found.name) == (None, "Drawing")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert tried("Muon") is None
    assert try_own(OptimizerSection()) is None


def test_optimizers_that_cannot_run_say_why() -> None:
    for name, labels, why in (
        ("LBFGS", ("single", "ddp", "zero2", "fsdp"), "needs a closure"),
        ("Adagrad", ("single", "ddp", "zero0", "fsdp", "fsdp1"), "None"),
        ("Adagrad", ("zero1", "zero2", "zero3", "accelerate-zero2"), "DeepSpeed replaces"),
    ):
        found = tried(name)
        assert all(why in str(found.why_not(strategy_of(label))) for label in labels), name


def trained(optimizers, model: nn.Module, steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_in_bf16_it_is_torchs_muon_beside_torchs_adamw_to_the_bit(shape) -> None:
    model = nn.Linear(*shape)
    other = copy.deepcopy(model)
    section = OptimizerSection(kind="muon", newton_schulz="bf16", learning_rate=0.01)
    groups = [{"params": [model.bias], "weight_decay": 0.0}]
    muon = torch.optim.Muon([other.weight], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([other.bias], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    ours = trained([build_muon([model.weight], groups, section)], model)
    theirs = trained([muon, adamw], other)
    assert all(map(torch.equal, ours, theirs))


def test_rows_or_columns_become_nearly_orthonormal() -> None:
    torch.manual_seed(0)
    for shape in ((12, 30), (30, 12)):
        singular = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
        assert singular.min() > 0.6
        assert singular.max() < 1.3


def test_groups_have_the_constants_that_they_use() -> None:
    model = nn.Linear(4, 4)
    groups = [{"params": [model.bias], "weight_decay": 0.0}]
    matrices, rest = build_muon([model.weight], groups, OptimizerSection(kind="muon")).param_groups
    assert matrices["momentum"] == 0.95
    assert "betas" not in matrices
    assert "momentum" not in rest


def test_a_matrix_whose_momentum_is_a_part_is_counted() -> None:
    whole, part = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(2, 6))
    optimizer = torch.optim.Muon([whole, part])
    for parameter in (whole, part):
        optimizer.state[parameter][MOMENTUM_KEY] = torch.zeros_like(parameter)
    shapes = {"a": torch.Size((4, 6)), "b": torch.Size((4, 6))}
    assert orthogonalised_in_parts(shapes, [optimizer]) == 1
    assert orthogonalised_in_parts({"a": torch.Size((4, 6))}, [optimizer]) == 0
    assert orthogonalised_in_parts(shapes, []) == 2


@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit"])
def test_its_precision_is_refused_where_it_would_be_ignored(kind: str) -> None:
    with pytest.raises(ValueError, match="would be ignored"):
        OptimizerSection(kind=kind, newton_schulz="bf16")
