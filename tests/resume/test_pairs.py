"""Training goes on from a checkpoint of another backend and another number of ranks as if never stopped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.backends.piece import OptimizerProgress
from harness.job.job import Job
from tests.resume.engines import LOST_SCALER, resume_job
from tests.resume.pairs import (
    Resumption,
    Side,
    is_exact,
    loss_difference,
    resume_all,
    save_all,
    trained,
    weight_difference,
)

pytestmark = pytest.mark.long(seconds=90)

LOSS_TOLERANCE = 5e-6
"""Nats per token. Gradients and losses of these tiny models are sums in fp32."""
WEIGHT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A job under several sides, some of which continue each other."""

    job: Job
    exact: Sequence[Side]
    """Sides that continue what they saved themselves to the bit, in both formats."""
    crossed: Sequence[Resumption]
    reference: Side | None = None
    """Whose uninterrupted run all the others are like; None: each like that of its target."""
    loss: float = LOSS_TOLERANCE
    weight: float = math.inf


def on_two(*names: str) -> list[Side]:
    return [Side(name, 2) for name in names]


def adapters(sides: Sequence[Side]) -> Case:
    """Frozen weights come back as they were, adapters train on as if never stopped."""
    job = resume_job(tied=True, adapter=ADAPTER, optimizer={"learning_rate": 2e-2})
    pairs = [("fsdp1", "zero3"), ("zero3", "fsdp"), ("fsdp", "ddp")]
    return Case(job, sides, [Resumption(*on_two(*pair)) for pair in pairs])


def native(*names: str) -> Case:
    """Each continues what it saved as if never stopped."""
    sides = on_two(*names)
    return Case(resume_job(), [], [Resumption(side, side, "native") for side in sides], loss=0, weight=0)


def low_precision(precision: str, *names: str) -> Case:
    """Strategies round low-precision sums in other orders."""
    sides = on_two(*names)
    crossed = [Resumption(sides[-1], side) for side in sides]
    return Case(resume_job(precision=precision, tied=True), sides, crossed, loss=2e-3)


def cut_layers(*sides: Side, tied: bool = False) -> Case:
    """Ranks that cut layers continue what others saved, and others continue them."""
    job = resume_job(tied=tied)
    heads = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {**(job.model.config or {}), **heads}
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": config})})
    ring = zip(sides, (*sides[1:], sides[0]), strict=True)
    crossed = [Resumption(source, target) for pair in ring for source, target in (pair, pair[::-1])]
    return Case(job, sides[1:], crossed, sides[0], weight=WEIGHT_TOLERANCE)


ADAPTER = {"kind": "lora", "rank": 3, "targets": ["q_proj", "up_proj"]}
DDP, PP = on_two("ddp", "pp")
TWO = (DDP, Side("tp", 2), Side("autotp-zero1", 2))
FOUR = (
    DDP, Side("tp:tensor=2", 4), Side("fsdp-tp", 4), Side("autotp-zero1", 4), Side("autotp-zero2", 4),
    Side("autotp-zero3", 4),
)  # fmt: skip
CASES = {
    "native": native("zero3", "fsdp", "fsdp1"),
    "native, all": native("ddp", "zero1", "zero3", "fsdp", "fsdp1", "accelerate-zero3"),
    "adapters": adapters(on_two("ddp", "zero3", "fsdp", "fsdp1")),
    "adapters of all": adapters(on_two("ddp", "zero1", "zero3", "fsdp", "fsdp1", "accelerate-zero3")),
    "frozen weights in their dtype": Case(
        resume_job(precision="bf16-mixed", adapter=ADAPTER | {"base_dtype": "bf16"}),
        on_two("zero3", "fsdp"), [],
    ),
    "bf16-mixed": low_precision("bf16-mixed", "zero0", "zero1", "zero3", "fsdp1"),
    "bf16": low_precision("bf16", "zero2", "zero3", "fsdp"),
    "layers in parts": cut_layers(*TWO),
    "layers in parts, tied": cut_layers(*TWO, tied=True),
    "layers in parts of 4": cut_layers(*FOUR),
    "layers in parts of 4, tied": cut_layers(*FOUR, tied=True),
    "a pipeline": Case(
        resume_job(), [], [Resumption(DDP, PP), Resumption(PP, DDP), Resumption(PP, PP, "native")],
        reference=DDP, weight=WEIGHT_TOLERANCE,
    ),
}  # fmt: skip
COSTLY = ("adapters", "frozen weights in their dtype", "layers in parts")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.costly if name in COSTLY else pytest.mark.exhaustive)
        if name not in ("a pipeline", "native")
        else name
        for name in CASES
    ],
)
def test_resuming_is_exact_and_others_go_on_alike(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    same = [Resumption(side, side, form) for form in ("native", "neutral") for side in case.exact]
    sides = dict.fromkeys(side for pair in (*same, *case.crossed) for side in (pair.source, pair.target))
    whole = trained(save_all(sides, case.job, tmp_path))
    resumed = trained(resume_all(dict.fromkeys([*same, *case.crossed]), case.job, tmp_path))
    assert [pair for pair in same if not is_exact(whole[pair.source], resumed[pair])] == []
    for pair in case.crossed if case.reference is None else resumed:
        expected = whole[case.reference or pair.target]
        assert loss_difference(expected, resumed[pair]) <= case.loss, pair
        assert weight_difference(expected, resumed[pair]) <= case.weight, pair
    if name.startswith("adapters"):
        weights = next(iter(whole.values())).weights
        assert sum(".lora_B." in of and bool(weight.any()) for of, weight in weights.items()) == 4


@pytest.mark.exhaustive
def test_the_loss_scaler_goes_on_and_losing_it_shows_in_the_progress(tmp_path: Path) -> None:
    job, side = resume_job(precision="fp16-mixed"), Side("fsdp1", 2)
    uninterrupted = trained(save_all([side], job, tmp_path))[side]
    sound = Resumption(side, side)
    forgetful = Resumption(side, side, "neutral", LOST_SCALER)
    resumed = trained(resume_all([sound, forgetful], job, tmp_path))
    expected = OptimizerProgress(updates=6, loss_scale=2.0**13, clean_steps=0)
    assert is_exact(uninterrupted, resumed[sound])
    assert resumed[sound].progress == uninterrupted.progress == expected
    assert resumed[forgetful].progress != expected
