"""Figures of memory that arithmetic or a publication fixes."""

from __future__ import annotations

import pytest

from tests.harness.forms.peak_memory.plain import held, layout, moments

MIB, GIB = 2**20, 2**30
BLOCKS = 10
BERT_BASE_CASED = 108_310_000
"""Parameters, as published to five digits."""


def test_bert_needs_what_is_published_for_each_moment() -> None:
    """`accelerate estimate-memory`: weights 413.18 MiB, backward 826.36 MiB, Adam's step 1.61 GiB."""
    model = layout(BLOCKS, BERT_BASE_CASED // BLOCKS)
    found = moments("single", model, 1, optimizer_implementation="fused")
    weights = held(found["step"], "weights")
    gradients = held(found["step"], "gradients")
    assert weights / MIB == pytest.approx(413.18, rel=1e-4)
    assert (weights + gradients) / MIB == pytest.approx(826.36, rel=1e-4)
    states = found["step"].bytes - held(found["step"], "temporary")
    assert states / GIB == pytest.approx(1.61, abs=0.005)


@pytest.mark.parametrize(("precision", "gigabytes"), [("fp32", (28, 28, 56)), ("bf16", (14, 14, 28))])
def test_seven_billion_parameters_on_one_device(precision: str, gigabytes: tuple[float, ...]) -> None:
    found = moments("single", layout(7, 10**9), 1, precision=precision, optimizer_implementation="fused")
    parts = [held(found["step"], kind) / 1e9 for kind in ("weights", "gradients", "optimizer")]
    assert parts == pytest.approx(gigabytes)


@pytest.mark.parametrize(("ranks", "shard"), [(128, 2.1875), (1280, 0.21875)])
def test_seventy_billion_parameters_in_eighty_units(ranks: int, shard: float) -> None:
    """Shards of fp32 weights, momentum and variance; a 16-bit unit of weights and one of gradients beside."""
    model = layout(80, 875_000_000)
    found = moments("fsdp", model, ranks, precision="bf16-mixed")
    assert held(found["step"], "weights") / 1e9 == pytest.approx(shard, rel=0.01)
    assert held(found["step"], "optimizer") / 1e9 == pytest.approx(2 * shard, rel=0.01)
    # FSDP2 gathers into one buffer and copies out of it: a unit twice.
    assert held(found["forward"], "gathered") / 1e9 == pytest.approx(2 * 1.75, rel=0.01)
    assert held(found["reduction"], "gradients", without="reduced") / 1e9 == pytest.approx(1.75, rel=0.01)


@pytest.mark.parametrize(("backend", "ranks"), [("single", 1), ("fsdp", 2), ("fsdp", 4)])
@pytest.mark.parametrize(("precision", "bytes_per_parameter"), [("bf16", 10), ("fp32", 20)])
def test_foreach_takes_ten_or_twenty_bytes_per_parameter(
    backend: str, ranks: int, precision: str, bytes_per_parameter: int
) -> None:
    """25 full fine-tunings of fms-acceleration on A100 peak at these figures: states and square roots."""
    model = layout(4, 10**8)
    found = moments(backend, model, ranks, precision=precision)
    whole = 4 * 10**8 * bytes_per_parameter / ranks
    # The norm's fp64 copy of one gradient is less than the roots.
    assert found["step"].bytes == pytest.approx(whole, rel=1e-6)


def test_mixed_precision_under_fsdp_takes_twenty_bytes_per_parameter() -> None:
    found = moments("fsdp1", layout(4, 10**8), 4, precision="bf16-mixed", preset="library-defaults")
    assert found["step"].bytes == pytest.approx(20 * 10**8, rel=1e-6)
