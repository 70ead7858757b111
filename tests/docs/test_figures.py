"""Figures that the text states and no generator writes."""

import re

from harness.plan.hardware import load_hardware
from harness.plan.models import catalogue_names
from tests.docs.markdown import ROOT


def page(name: str) -> str:
    """Its text on one line, without the marks of quotations."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").replace("\n> ", "\n").split())


def test_the_catalogue_has_as_many_entries_as_the_text_says() -> None:
    hardware, models = load_hardware(), len(catalogue_names())
    sizes = f"{models} public models on {len(hardware.devices)} GPUs and {len(hardware.fabrics)} networks"
    assert sizes in page("CHANGELOG.md")
    assert f"lists {models} public models" in page("docs/planning.md")


def test_every_page_has_the_accumulation_of_the_recommended_command() -> None:
    """4,096 tokens a sample on 64 GPUs."""
    answered = re.search(r"-> Use zero1, micro-batch 1, accumulation (\d+): ", page("README.md"))
    assert answered
    steps = int(answered[1])
    assert f"`zero1`: {steps} micro-steps of one sample fit" in page("docs/which-strategy.md")
    assert f"at {steps * 64 * 4096 / 1e6:.1f} million tokens per step" in page("docs/planning.md")
