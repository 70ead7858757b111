"""Sizes as polynomials in micro-batch and sequence, and profiles as JSON."""

import json
from dataclasses import replace

import pytest

from harness.forms import activations
from harness.forms.peak_memory.families import peak_moments
from harness.forms.workload import Workload
from harness.plan.models import load_model
from harness.plan.profiles import find_profile
from tests.built_in import strategy


def size(**of: int) -> activations.Size:
    names = ("one", "b", "s", "bs", "ss", "bss")
    return activations.Size(tuple(of.get(name, 0) for name in names))


def test_a_size_is_evaluated_at_micro_batch_and_sequence() -> None:
    whole = size(one=1, b=2, s=3, bs=4, ss=5, bss=6)
    assert whole.bytes(10, 100) == 1 + 20 + 300 + 4_000 + 50_000 + 600_000
    assert str(size(one=8, bs=4) - size(b=2)) == "8 - 2 b + 4 b s"


def test_a_size_is_at_most_another_only_if_every_coefficient_is() -> None:
    assert size(bs=3).at_most(size(bs=3, s=1))
    assert not size(bs=3, one=1).at_most(size(bs=4))


@pytest.fixture
def profile() -> activations.ActivationProfile:
    def segment(count: int) -> activations.Segment:
        return activations.Segment(
            saved=(activations.Saved(module="mlp", size=size(bs=count)),),
            forward=(activations.Point(module="mlp", live=size(bs=count), ready=0),),
            backward=(activations.Point(module="mlp", live=size(bs=count, one=1), ready=1),),
            gradients=(activations.Gradient(parameter="mlp.weight", live=size(s=2)),),
            forward_growth=size(bs=count),
            held=size(bs=count),
        )

    return activations.ActivationProfile(
        embedding=segment(1), block=segment(2), head=segment(3), loss=segment(4), kept=size(one=4)
    )


def test_a_profile_survives_json(profile: activations.ActivationProfile) -> None:
    assert activations.from_json(json.loads(json.dumps(activations.to_json(profile)))) == profile


def test_blocks_save_their_activations_each(profile: activations.ActivationProfile) -> None:
    assert profile.saved_bytes(5, 1, 10) == 10 * (1 + 5 * 2 + 3 + 4)


TOKENS = 4096


def llama(*, checkpointing: bool = True) -> activations.ActivationProfile:
    """Of Llama-3.1-8B, as it ships."""
    return find_profile(
        load_model("llama-3.1-8b").config, route="cast", attention="sdpa", checkpointing=checkpointing,
        single_sample=True, device="cuda",
    )  # fmt: skip


def test_a_block_keeps_what_is_kept_more_until_its_backward_pass() -> None:
    plain = llama(checkpointing=False).block
    input_of = activations.Saved(module="mlp.down_proj", size=activations.Size((0, 0, 0, 28672, 0, 0)))

    def changes(**asked) -> tuple[activations.Size, activations.Size, set[activations.Size]]:
        block = profile_of(plain).with_block((input_of,), **asked).block
        points = {b.live - a.live for a, b in zip(plain.backward, block.backward, strict=True)}
        return block.forward_growth - plain.forward_growth, block.held - plain.held, points

    def profile_of(block) -> activations.ActivationProfile:
        return activations.ActivationProfile(
            embedding=block, block=block, head=block, loss=block, kept=activations.Size()
        )

    assert changes() == (input_of.size, input_of.size, {input_of.size})
    assert changes(until_backward=False) == (activations.Size(), activations.Size(), {input_of.size})


def test_a_graph_that_lives_on_is_there_until_the_loss_is_computed() -> None:
    lingering = activations.Size((0, 0, 0, 10**9, 0, 0))
    workload = Workload(
        layout=load_model("llama-3.1-8b").layout, strategy=strategy("single"), world_size=1,
        micro_batch_size=1, sequence_length=TOKENS, device="cuda", transport="nccl",
    )  # fmt: skip
    plain, longer = (peak_moments(workload, one) for one in (llama(), replace(llama(), lingering=lingering)))
    more = {phase: longer[phase].bytes - plain[phase].bytes for phase in plain}
    assert more == {"forward": TOKENS * 10**9, "backward": 0, "step": TOKENS * 10**9}
