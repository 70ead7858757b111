"""What other programs keep, in the place of what a job of ours does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.losses import FAST, FUSED, WIDENED_SHIFTED
from harness.backends.registry import strategy_of
from harness.forms.activations import OURS, ActivationProfile, LogitBytes, Point, Saved, Size
from harness.forms.peak_memory.families import peak_moments
from harness.forms.workload import Workload
from harness.plan.models import load_model
from harness.plan.profiles import find_profile

TOKENS = 4096


@pytest.fixture(scope="module")
def profile() -> ActivationProfile:
    return find_profile(
        load_model("llama-3.1-8b").config, route="cast", attention="sdpa", checkpointing=True,
        single_sample=True, device="cuda",
    )  # fmt: skip


def most(points: tuple[Point, ...]) -> float:
    """Bytes per logit, those below the segment not counted."""
    return max(point.live.bytes(1, TOKENS) for point in points) / TOKENS / 128256


def test_a_job_s_own_loss_is_what_tracing_shows(profile: ActivationProfile) -> None:
    assert most(profile.loss.forward) + 2 == pytest.approx(OURS.forward, rel=0.01)
    assert most(profile.loss.backward) + 2 == pytest.approx(OURS.backward, rel=0.01)


@pytest.mark.parametrize("other", [FAST, FUSED, WIDENED_SHIFTED])
def test_another_loss_holds_its_bytes_per_logit(profile: ActivationProfile, other: LogitBytes) -> None:
    changed = profile.with_loss(other)
    assert most(changed.loss.forward) + 2 == pytest.approx(other.forward, rel=0.01)
    assert most(changed.loss.backward) + 2 == pytest.approx(other.backward, rel=0.01)
    kept = profile.with_loss(replace(other, kept=4)).kept - profile.kept
    assert kept.bytes(1, TOKENS) == pytest.approx(4 * TOKENS * 128256, rel=0.01)


def test_a_block_keeps_what_another_program_keeps_until_its_backward_pass() -> None:
    plain = find_profile(
        load_model("llama-3.1-8b").config, route="cast", attention="sdpa", checkpointing=False,
        single_sample=True, device="cuda",
    ).block  # fmt: skip
    input_of = Saved(module="mlp.down_proj", size=Size((0, 0, 0, 28672, 0, 0)))
    gone = next(saved for saved in plain.saved if saved.module == "mlp.act_fn")

    def changes(**asked) -> tuple[Size, Size, set[Size]]:
        block = profile_of(plain).with_block(**asked).block
        points = {b.live - a.live for a, b in zip(plain.backward, block.backward, strict=True)}
        return block.forward_growth - plain.forward_growth, block.held - plain.held, points

    def profile_of(block) -> ActivationProfile:
        return ActivationProfile(embedding=block, block=block, head=block, loss=block, kept=Size())

    assert changes(more=(input_of,)) == (input_of.size, input_of.size, {input_of.size})
    assert changes(more=(input_of,), until_backward=False) == (Size(), Size(), {input_of.size})
    assert changes(recomputed=("act_fn",)) == (gone.size.times(-1), gone.size.times(-1), {Size()})


def test_a_graph_that_lives_on_is_there_until_the_loss_is_computed(profile: ActivationProfile) -> None:
    lingering = Size((0, 0, 0, 10**9, 0, 0))
    strategy = strategy_of("single")
    assert strategy is not None
    workload = Workload(
        layout=load_model("llama-3.1-8b").layout, strategy=strategy, world_size=1, micro_batch_size=1,
        sequence_length=TOKENS, device="cuda", transport="nccl",
    )  # fmt: skip
    plain, longer = (peak_moments(workload, one) for one in (profile, replace(profile, lingering=lingering)))
    more = {phase: longer[phase].bytes - plain[phase].bytes for phase in plain}
    assert more == {"forward": TOKENS * 10**9, "backward": 0, "step": TOKENS * 10**9}
    head = profile.with_head(Size((7, 0, 0, 0, 0, 0))).head
    assert {b.live - a.live for a, b in zip(profile.head.forward, head.forward, strict=True)} == {
        Size((7, 0, 0, 0, 0, 0))
    }
