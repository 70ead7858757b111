"""The page that says which strategy to take holds what the closed forms say today."""

import pytest

from docs.hooks.strategies import FABRICS, LABELS, MODELS, OWNERS, SPEED_MODEL, figures, strategies_page
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "which-strategy.md"
pytestmark = pytest.mark.long(seconds=15)


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
    assert given.slower_fabrics("fsdp-hybrid", "fsdp", 1)[-1] == FABRICS[-1]
    for fabric in FABRICS[1:]:
        assert all(
            given.ratio("zero1", label, fabric, 16) > 1
            for label in LABELS
            if label not in ("zero1", "fsdp-hybrid")
        )
    for model in MODELS:
        assert given.gigabytes(model, 64, "fsdp") == pytest.approx(
            given.gigabytes(model, 64, "fsdp1"), rel=0.1, abs=1.0
        )
