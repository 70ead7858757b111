"""The optimizer that is Muon for matrices of blocks and AdamW for the rest."""

import copy

import pytest
import torch
from torch import nn

from harness.job.job import OptimizerSection
from harness.rank.models.optimizer import MOMENTUM_KEY, build_muon, orthogonalised, orthogonalised_in_parts


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
