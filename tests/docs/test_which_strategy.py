"""The pages that say which strategy to take, and that answer public questions, hold what is said today.

`make test` holds the page's first part; `make test-docs` the whole page and its sweeps.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

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
from harness.cli import harness
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
        assert many.device_bytes == pytest.approx(one.device_bytes, rel=0.01)
    recommended = re.search(
        r"zero1, micro-batch 1, accumulation 16: ([\d.]+) of", (ROOT / "README.md").read_text()
    )
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
        is_slower = batches.ratio("fsdp-tp", few) < batches.ratio("fsdp-cp", few)
        assert is_slower == (sweeps.GPUS // few < 8)
    for label in ("fsdp:reshard=8", "zero3:hpz=8"):
        pays = sweeps.copies_pay(label)
        assert pays == list(FABRICS[FABRICS.index(pays[0]) :])
    assert not sweeps.copies_pay("fsdp-hybrid")


def test_the_bubble_falls_under_a_tenth_where_the_page_says() -> None:
    enough = sweeps.enough_parts(0.1)
    ranks = sweeps.STAGES
    assert (ranks - 1) / (enough + ranks - 1) < 0.1 <= (ranks - 1) / (enough - 1 + ranks - 1)


PAGES = {ROOT / "docs" / "planning.md": 11, ROOT / "README.md": 1, ROOT / "tests/golden/answers.md": 4}
"""With how many answers each has."""
ASKED = re.compile(r"harness (.+)\n# -> (.+)")
ANSWER = re.compile(
    r"(?:[\d,]+ ranks?[,:]|Use |nothing fits).+?(?= Runner-up: | No runner-up| With | Close to |$)"
)
"""The first of what is said, which the pages have."""


def questions(page: Path) -> Iterator[re.Match[str]]:
    """Words after `harness`, answer."""
    return ASKED.finditer(page.read_text(encoding="utf-8"))


def answer(words: str) -> str:
    done = CliRunner().invoke(harness, shlex.split(words), prog_name="harness")
    assert done.exit_code == 0, done.output
    said = [" ".join(part.split("\n")) for part in done.stdout.split("\n\n")]
    return next((found[0] for part in said if (found := ANSWER.match(part))), said[0])


@pytest.mark.exhaustive
def test_each_question_has_its_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, update_golden: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the profiles that ship, whatever was traced here
    answers = {words: answer(words) for words in {match[1] for page in PAGES for match in questions(page)}}
    for page, count in PAGES.items():
        found = {match[0]: (match[2], answers[match[1]]) for match in questions(page)}
        assert len(found) == count
        if update_golden:
            text = page.read_text(encoding="utf-8")
            for asked, (old, new) in found.items():
                text = text.replace(asked, asked.removesuffix(old) + new)
            page.write_text(text, encoding="utf-8")
            continue
        assert {asked: old for asked, (old, _) in found.items()} == {
            asked: new for asked, (_, new) in found.items()
        }
