"""Sizes as polynomials in micro-batch and sequence, and profiles as JSON."""

from __future__ import annotations

import json

import pytest

from harness.forms.activations import (
    ActivationProfile,
    Gradient,
    Point,
    Saved,
    Segment,
    Size,
    from_json,
    to_json,
)


def size(**of: int) -> Size:
    names = ("one", "b", "s", "bs", "ss", "bss")
    return Size(tuple(of.get(name, 0) for name in names))


def test_a_size_is_evaluated_at_micro_batch_and_sequence() -> None:
    whole = size(one=1, b=2, s=3, bs=4, ss=5, bss=6)
    assert whole.bytes(10, 100) == 1 + 20 + 300 + 4_000 + 50_000 + 600_000
    assert str(size(one=8, bs=4) - size(b=2)) == "8 - 2 b + 4 b s"


def test_a_size_is_at_most_another_only_if_every_coefficient_is() -> None:
    assert size(bs=3).at_most(size(bs=3, s=1))
    assert not size(bs=3, one=1).at_most(size(bs=4))


@pytest.fixture
def profile() -> ActivationProfile:
    def segment(count: int) -> Segment:
        return Segment(
            saved=(Saved(module="mlp", size=size(bs=count)),),
            forward=(Point(module="mlp", live=size(bs=count), ready=0),),
            backward=(Point(module="mlp", live=size(bs=count, one=1), ready=1),),
            gradients=(Gradient(parameter="mlp.weight", live=size(s=2)),),
            forward_growth=size(bs=count),
            held=size(bs=count),
        )

    return ActivationProfile(
        embedding=segment(1), block=segment(2), head=segment(3), loss=segment(4), kept=size(one=4)
    )


def test_a_profile_survives_json(profile: ActivationProfile) -> None:
    assert from_json(json.loads(json.dumps(to_json(profile)))) == profile


def test_blocks_save_their_activations_each(profile: ActivationProfile) -> None:
    assert profile.saved_bytes(5, 1, 10) == 10 * (1 + 5 * 2 + 3 + 4)
