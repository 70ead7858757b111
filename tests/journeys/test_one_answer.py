"""recommend, estimate and the pages give one answer to one question."""

import json
import shlex
from typing import Any

import pytest

from tests.docs.markdown import ROOT, shell_lines
from tests.journeys.journey import Journey

pytestmark = [pytest.mark.exhaustive, pytest.mark.long(seconds=90)]
PAGES = ("README.md", "docs/planning.md", "docs/which-strategy.md")
PAGE = ROOT / "docs" / "which-strategy.md"


def example() -> list[str]:
    """The words of the pages' first `harness recommend`, which is the same on all of them."""
    lines = [
        next(text for _, text in shell_lines(ROOT / page) if text.startswith("harness recommend"))
        for page in PAGES
    ]
    (words,) = {tuple(shlex.split(line, comments=True)) for line in lines}
    return list(words[1:])


def test_the_example_of_the_pages_gets_their_answer(journey: Journey) -> None:
    (said,) = (line for line in PAGE.read_text().splitlines() if line.startswith("The first of these says"))
    backend = said.split("`")[1]
    answer: dict[str, Any] = json.loads(journey.harness("recommend", *example()[1:], "--json").stdout)
    best = answer["best"][0]
    assert best["backend"] == backend
    assert answer["data_parallel_is_right"]
    assert f"{best['accumulation_steps']} micro-steps of one sample" in said
    assert best["micro_batch_size"] == 1
    settings = {
        "training.global_batch_size": answer["tokens_per_step"] // answer["sequence_length"],
        "training.micro_batch_size": best["micro_batch_size"],
    }
    estimated = journey.harness(
        "estimate", "--model", "llama-3.1-8b", "--world-size", "64", "--gpu", "H100-80", "--fabric", "NDR400",
        "--backends", ",".join(row["backend"] for row in answer["best"] if row["micro_batch_size"] == 1),
        *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")), "--json",
    )  # fmt: skip
    rows = {row["backend"]: row for row in json.loads(estimated.stdout)["rows"]}
    for row in answer["best"]:
        if row["micro_batch_size"] == 1:
            assert rows[row["backend"]]["tokens_per_second_per_gpu"] == row["tokens_per_second_per_gpu"]


def test_where_the_presets_differ_both_winners_are_named(journey: Journey) -> None:
    asked = ("--model", "llama-3.1-8b", "--gpus", "4", "--gpu", "A100-80", "--tokens-per-step", "256K")
    done = journey.harness("recommend", *asked, "--json")
    answer = json.loads(done.stdout)
    said = " ".join(done.stderr.split())
    assert answer["best"][0]["backend"] == "fsdp"
    assert "Use fsdp, " in said
    winner = answer["other_preset"]["best"]["backend"]
    assert winner != "fsdp"
    assert f"With runtime.preset=like-for-like: {winner}, " in said
    for line in answer["commands"]["compare"][:-1]:
        shown = journey.printed(line, "--dry-run")
        words = line.split()
        assert words[words.index("--backends") + 1].split(",")[0] in shown.stdout
