"""Whether a loss is a sum over samples shows in the gradients of a batch and of its halves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from harness.backends.base import Batch
from harness.job.job import Job
from harness.rank.models import description
from harness.rank.models.description import split_dependence
from harness.record import SplitPart
from tests.traps import own_jobs

SAMPLES = own_jobs.samples()
JOBS = "tests.traps.own_jobs"


def batch_of(ids: Sequence[int]) -> Batch:
    return {name: torch.stack([SAMPLES[i][name] for i in ids]) for name in SAMPLES[0]}


def measured(
    loss: str, model: str = "classifier", arguments: dict | None = None, batches: int = 8, **rest
) -> SplitPart:
    torch.manual_seed(0)
    built = getattr(own_jobs, model)(**rest)
    job = Job.model_validate(
        {
            "task": "custom", "model": {"factory": f"{JOBS}:{model}", "arguments": rest},
            "data": {"factory": f"{JOBS}:samples"},
            "loss": {
                "factory": f"{JOBS}:{loss}", "reduction": "mean", "targets": "samples",
                "arguments": arguments or {},
            },
        }
    )  # fmt: skip
    before = [tensor.clone() for tensor in (*built.parameters(), *built.buffers())]
    found = split_dependence(job, built, batch_of, [range(8 * n, 8 * n + 8) for n in range(batches)])
    after = [*built.parameters(), *built.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.get_default_dtype() is torch.float32
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("loss", "model", "rest"),
    [
        ("contrastive", "towers", {}),
        ("mean", "classifier", {"statistics": True}),
        ("mixup", "classifier", {}),
        ("weighted", "classifier", {}),
    ],
)
def test_a_loss_of_the_batch_depends_on_the_split(loss: str, model: str, rest: dict) -> None:
    found = measured(loss, model, **rest)
    assert found.depends
    assert not found.is_random
    assert found.difference > 0.01


def test_a_mean_over_samples_does_not() -> None:
    found = measured("mean")
    assert not found.depends
    assert found.difference < 1e-6


def test_of_a_large_model_losses_are_compared_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MOST_WITH_GRADIENTS", 0)
    assert not measured("mean").depends
    assert measured("contrastive", "towers").difference > 0.01

    def refuses(*_: object) -> None:
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(torch.Tensor, "backward", refuses)
    assert measured("mixup").depends


def test_random_numbers_are_told_from_the_split() -> None:
    assert measured("mixup", arguments={"random": True}).is_random


class Student(nn.Module):
    """Learns from a running mean of its own weights, which each forward pass moves, or its samples too."""

    def __init__(self, follows: float, by_samples: bool = False) -> None:
        super().__init__()
        self.layer, self.follows, self.by_samples = nn.Linear(8, 4), follows, by_samples
        self.register_buffer("teacher", self.layer.weight.detach().clone())

    def forward(self, left: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.lerp_(self.layer.weight, self.follows * (left.mean() if self.by_samples else 1))
        return (self.layer(left) - left @ self.teacher.T).square().mean()


@pytest.mark.parametrize(
    ("follows", "by_samples", "found_as"),
    [(0.004, False, "counts_passes"), (0.2, True, "is_random"), (0.0, False, None)],
)
def test_a_mean_of_weights_that_each_pass_moves_is_told(
    monkeypatch: pytest.MonkeyPatch, follows: float, by_samples: bool, found_as: str | None
) -> None:
    """Though it begins as the weights, with which no pass would move it."""
    monkeypatch.setattr(own_jobs, "student", lambda: Student(follows, by_samples), raising=False)
    monkeypatch.setattr(own_jobs, "taught", lambda: lambda model, batch: model(batch["left"]), raising=False)
    found = measured("taught", "student")
    names = ("counts_passes", "is_random")
    assert [name for name in names if getattr(found, name)] == ([found_as] if found_as else [])


def test_a_spectral_norm_counts_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def normed() -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))

    monkeypatch.setattr(own_jobs, "normed", normed, raising=False)
    monkeypatch.setattr(
        own_jobs, "squares", lambda: lambda model, batch: model(batch["left"]).square().mean(), raising=False
    )
    found = measured("squares", "normed")
    assert found.counts_passes
    assert found.depends
    assert found.repetition > 100 * found.rounding


def test_code_that_takes_fp32_only_is_measured_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_fp32():
        def compute(model, batch):
            if batch["left"].dtype != torch.float32:
                raise TypeError("fp32 only")
            return own_jobs.contrastive()(model, batch)

        return compute

    monkeypatch.setattr(own_jobs, "fp32_only", only_fp32, raising=False)
    found = measured("fp32_only", "towers")
    assert found.depends
    assert found.rounding == 2.0**-10


def test_halves_of_the_first_batch_may_agree_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    def branching():
        def compute(model, batch):
            return own_jobs.mean()(model, batch) * (1 + (batch["left"][0, 0] > 1))

        return compute

    monkeypatch.setattr(own_jobs, "branching", branching, raising=False)
    assert not measured("branching", batches=1).depends
    found = measured("branching")
    assert found.depends
    assert not found.is_random


def test_halves_that_take_other_branches_depend_on_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def branching():
        def compute(model, batch):
            block = model.blocks[int(batch["left"][0, 0] > 0)]
            return block(model.first(batch["left"])).square().mean()

        return compute

    monkeypatch.setattr(own_jobs, "branching", branching, raising=False)
    assert measured("branching").depends


def test_halves_whose_gradients_are_not_finite_depend_on_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def branching():
        def compute(model, batch):
            left = batch["left"]
            lost = len(left) < 8 and bool(left[0, 0] > 1)
            return own_jobs.mean()(model, batch) * (torch.nan if lost else 1.0)

        return compute

    monkeypatch.setattr(own_jobs, "branching", branching, raising=False)
    found = measured("branching")
    assert found.depends
    assert not found.is_random
    assert SplitPart.model_validate_json(found.model_dump_json()) == found
