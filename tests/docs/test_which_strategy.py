"""The page that says which strategy to take holds what the closed forms say today.

`make test` holds the page's first part; `make test-docs` the whole page and its sweeps.
"""

import re

import pytest

from docs.hooks import sweeps
from docs.hooks.strategies import (
    ACCUMULATED_MODELS,
    ACCUMULATING,
    FABRICS,
    LABELS,
    MODELS,
    OWNERS,
    RANKS,
    SPEED_MODEL,
    STEPS,
    accumulated,
    figures,
    kept_gigabytes,
    strategies_page,
)
from harness.backends.base import World
from harness.backends.options import shard_size
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "which-strategy.md"


@pytest.mark.documented
@pytest.mark.exhaustive
@pytest.mark.long(seconds=75)
def test_the_page_is_up_to_date(update_golden: bool) -> None:
    if update_golden:
        PAGE.write_text(strategies_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == strategies_page()


def test_what_the_page_says_in_words_holds() -> None:
    given = figures()
    assert given.largest(8, "ddp") == given.largest(64, "ddp") == SPEED_MODEL
    assert not given.fits("llama-3.1-8b", 8, "ddp")
    assert given.fits("qwen2.5-32b", 64, "zero2")
    assert not given.fits("qwen2.5-32b", 64, "zero1")
    assert given.sent("ddp", 1) == given.sent("ddp", 16)
    assert given.sent("zero1", 1) == given.sent("zero1", 16) == given.sent("zero2", 1)
    assert given.sent("zero1", 16) == pytest.approx(1.5 * given.sent(OWNERS, 16), rel=1e-4)
    assert given.sent("zero2", 16) > 10 * given.sent("zero1", 16)
    for steps in STEPS:
        close = [
            given.speed(label, FABRICS[0], steps) for label in LABELS if label == "zero1" or "fsdp" in label
        ]
        assert min(close) > 0.9 * max(close)
    for fabric in FABRICS:
        assert all(given.ratio("zero1", "ddp", fabric, steps) > 1 for steps in STEPS)
        assert given.ratio("fsdp-grad-op", "zero1", fabric, 1) > 1
    assert given.ratio("fsdp-grad-op", "zero1", FABRICS[0], 4) > 0.95
    assert shard_size(World.planned(8, 8, "cuda"), None) == 4
    assert kept_gigabytes() > 1.5 * given.gigabytes("llama-3.1-8b", 64, "zero1")
    for model in ACCUMULATED_MODELS:
        for ranks in RANKS:
            for label in ACCUMULATING:
                assert accumulated().gigabytes(model, ranks, label) > given.gigabytes(model, ranks, label)
    for label in ("ddp", "zero3"):
        one, many = (given.row(SPEED_MODEL, RANKS[-1], label, steps=n).memory for n in (STEPS[0], STEPS[-1]))
        assert one is not None
        assert many is not None
        assert many.device_bytes == pytest.approx(one.device_bytes, rel=0.01)
    recommended = re.search(
        r"zero1, micro-batch 1, accumulation 16: ([\d.]+) of", (ROOT / "README.md").read_text()
    )
    assert recommended is not None
    assert float(recommended[1]) == pytest.approx(kept_gigabytes(), abs=0.05)
    assert given.slower_fabrics("fsdp-hybrid", "fsdp", 1)[-1] == FABRICS[-1]
    for fabric, steps in [(f, 16) for f in FABRICS[1:]] + [(f, 4) for f in FABRICS[2:]]:
        assert all(
            given.ratio("zero1", label, fabric, steps) > 1
            for label in LABELS
            if label not in ("zero1", "fsdp-hybrid")
        )
    for model in MODELS:
        assert given.gigabytes(model, 64, "fsdp") == pytest.approx(
            given.gigabytes(model, 64, "fsdp1"), rel=0.1, abs=1.0
        )


@pytest.mark.documented
@pytest.mark.exhaustive
def test_divided_strategies_pay_where_the_page_says_and_not_before() -> None:
    lengths, batches = sweeps.by_length(), sweeps.by_batch()
    for backend in lengths.divided:
        assert lengths.pays(backend)
        assert set(lengths.pays(backend)).isdisjoint(lengths.plain_fits())
    assert sweeps.in_loss(lengths.least[lengths.pays("ulysses-zero3")[0]]) > 0
    for backend in ("fsdp-tp", "fsdp-cp", "ulysses-zero3"):
        assert batches.pays(backend) == [n for n in sweeps.BATCHES if n < sweeps.GPUS]
    staged = sweeps.pipelines()
    for samples in sweeps.PIPELINED:
        ratios = [staged.ratio(fabric, samples) for fabric in FABRICS]
        assert ratios == sorted(ratios)
    for fabric in FABRICS:
        pays = staged.pays(fabric)
        assert pays == list(sweeps.PIPELINED[: len(pays)])
    for few in batches.pays("fsdp-tp"):
        assert batches.ratio("fsdp-tp", few) < batches.ratio("fsdp-cp", few)
    for label in ("fsdp:reshard=8", "zero3:hpz=8"):
        pays = sweeps.copies_pay(label)
        assert pays == list(FABRICS[FABRICS.index(pays[0]) :])
    assert not sweeps.copies_pay("fsdp-hybrid")


def test_the_bubble_falls_under_a_tenth_where_the_page_says() -> None:
    enough = sweeps.enough_parts(0.1)
    ranks = sweeps.STAGES
    assert (ranks - 1) / (enough + ranks - 1) < 0.1 <= (ranks - 1) / (enough - 1 + ranks - 1)
