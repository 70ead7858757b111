"""Axes of the job where ranks divide samples or blocks, or keep weights within groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.traps.clean import AFTER_TRACE, GROUPS, LABELS, PRECISIONS, assert_clean
from tests.traps.matrix import Matrix

from .test_cost_settings import assert_equal_losses

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=120)]

CHECKPOINTING = "training.activation_checkpointing"
TWO_RANKS = ("pp", "cp", "ulysses-zero3", LABELS["ulysses-zero1"])
COST_ALONE = {
    2: (LABELS["ulysses-zero2"], ["overlap_comm=true", "contiguous_gradients=false"]),
    4: ("zero3:hpz=2", ["overlap_comm=true", "contiguous_gradients=false"]),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("checkpointing", ["all", "every-2"])
def test_blocks_recompute_where_ranks_divide_samples_or_blocks(
    checkpointing: str, precision: str, matrix: Matrix
) -> None:
    assert_axis([f"{CHECKPOINTING}={checkpointing}", AFTER_TRACE], TWO_RANKS, 2, precision, matrix)


def test_a_pipeline_recomputes_selectively(matrix: Matrix) -> None:
    """What the others send then is not derived."""
    assert_axis([f"{CHECKPOINTING}=selective"], ["pp"], 2, "fp32", matrix)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_blocks_recompute_within_groups_of_ranks(precision: str, matrix: Matrix) -> None:
    settings = [f"{CHECKPOINTING}=every-2", AFTER_TRACE]
    assert_axis(settings, [*GROUPS, "fsdp-cp"], 4, precision, matrix)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_of_some_tokens_at_a_time_where_ranks_divide_samples_or_blocks(
    precision: str, matrix: Matrix
) -> None:
    """Of a part of a sample; of what the last stage gives."""
    assert_axis(["loss.chunk_tokens=5", AFTER_TRACE], TWO_RANKS, 2, precision, matrix)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_of_some_tokens_at_a_time_within_groups_of_ranks(precision: str, matrix: Matrix) -> None:
    assert_axis(["loss.chunk_tokens=8", AFTER_TRACE], GROUPS, 4, precision, matrix)


@pytest.mark.parametrize("world_size", COST_ALONE)
def test_settings_that_decide_cost_alone_leave_losses_alone(world_size: int, matrix: Matrix) -> None:
    label, options = COST_ALONE[world_size]
    labels = [label, *(f"{label},{option}" for option in options)]
    settings = (AFTER_TRACE, "training.precision=fp32")
    assert_clean(labels, world_size, settings, matrix)
    assert_equal_losses({name: matrix.record(name, world_size, settings) for name in labels})


def assert_axis(
    settings: Sequence[str], labels: Sequence[str], world_size: int, precision: str, matrix: Matrix
) -> None:
    """No finding, the reference's parity, states and bytes as derived."""
    assert_clean(labels, world_size, (*settings, f"training.precision={precision}"), matrix)
