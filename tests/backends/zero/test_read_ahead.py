"""A weight that was read from its file for a module that did not run is not kept beyond the update."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from harness.backends import registry
from harness.backends.base import World
from harness.backends.libraries.extensions import ASYNC_IO
from harness.backends.zero.extension_builds import unmet_build
from harness.job.job import Job
from tests.resume.engines import STEPS, Trained, make_engine, resume_job, train
from tests.resume.pairs import is_exact
from tests.resume.ranks import on_ranks
from tests.resume.test_files import MODEL

UNMET = unmet_build(ASYNC_IO)
pytestmark = [
    pytest.mark.exhaustive, pytest.mark.long(seconds=40),
    pytest.mark.skipif(bool(UNMET), reason=" ".join(UNMET)),
]  # fmt: skip

LABEL = "zero3:offload=nvme-all"


def trained_with_readings(world: World, *, readings: bool, released: bool = True) -> Trained:
    """All steps; `readings`: before each update a piece is read, as a prefetch reads it."""
    world = registry.placed(LABEL, world)
    engine: Any = make_engine(LABEL, world, job())
    named = dict(engine.engine.module.named_parameters())
    (weight,) = (parameter for name, parameter in named.items() if "down_proj" in name)
    step = engine.step

    def after_reading(lr: float) -> float:
        if readings:
            weight.nvme_swapper.swap_in([weight], async_op=False)
        norm: float = step(lr)
        return norm

    engine.step = after_reading
    if released:
        done = train(engine, world, job(), 0, STEPS)
    else:
        with patch("harness.backends.zero.swapping.release_read_ahead"):
            done = train(engine, world, job(), 0, STEPS)
    engine.close()
    return done


def job() -> Job:
    return resume_job(model={"config": MODEL})


def without(world: World) -> Trained:
    return trained_with_readings(world, readings=False)


def with_readings(world: World) -> Trained:
    return trained_with_readings(world, readings=True)


def without_release(world: World) -> Trained:
    return trained_with_readings(world, readings=True, released=False)


def test_updates_reach_the_file_of_a_weight_that_was_read_ahead() -> None:
    expected, found = on_ranks(2, [without, with_readings])
    assert is_exact(expected, found)


def test_an_update_that_stays_in_the_buffer_would_show() -> None:
    expected, stale = on_ranks(2, [without, without_release])
    assert not is_exact(expected, stale)
    assert all(torch.isfinite(torch.tensor(stale.losses)))
