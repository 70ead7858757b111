"""What losses and blocks of other programs hold, next to ours."""

from dataclasses import replace

import pytest

from benchmarks.published.losses import FAST, FUSED, OURS, WIDENED_SHIFTED, LogitBytes, with_loss
from benchmarks.published.programs import recomputing, with_head
from harness.forms.activations import Point, Size
from tests.harness.forms.test_activations import TOKENS, llama

LLAMA = llama()


def most(points: tuple[Point, ...]) -> float:
    """Bytes per logit, those below the segment not counted."""
    return max(point.live.bytes(1, TOKENS) for point in points) / TOKENS / 128256


def test_a_job_s_own_loss_is_what_tracing_shows() -> None:
    assert most(LLAMA.loss.forward) + 2 == pytest.approx(OURS.forward, rel=0.01)
    assert most(LLAMA.loss.backward) + 2 == pytest.approx(OURS.backward, rel=0.01)


@pytest.mark.parametrize("other", [FAST, FUSED, WIDENED_SHIFTED])
def test_another_loss_holds_its_bytes_per_logit(other: LogitBytes) -> None:
    changed = with_loss(LLAMA, other)
    assert most(changed.loss.forward) + 2 == pytest.approx(other.forward, rel=0.01)
    assert most(changed.loss.backward) + 2 == pytest.approx(other.backward, rel=0.01)
    kept = with_loss(LLAMA, replace(other, kept=4)).kept - LLAMA.kept
    assert kept.bytes(1, TOKENS) == pytest.approx(4 * TOKENS * 128256, rel=0.01)


def test_what_is_recomputed_is_there_in_the_backward_pass_alone() -> None:
    plain = llama(checkpointing=False)
    gone = next(saved for saved in plain.block.saved if saved.module == "mlp.act_fn")
    found = recomputing(plain, ("act_fn",)).block
    assert found.forward_growth - plain.block.forward_growth == gone.size.times(-1)
    assert found.held - plain.block.held == gone.size.times(-1)
    assert found.backward == plain.block.backward


def test_a_head_that_is_unpacked_is_there_while_it_computes() -> None:
    beside = Size((7, 0, 0, 0, 0, 0))
    pairs = zip(LLAMA.head.forward, with_head(LLAMA, beside).head.forward, strict=True)
    assert {after.live - before.live for before, after in pairs} == {beside}
