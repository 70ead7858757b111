"""Memory in a sentence: which cells need least, related to DDP, and whether states are as expected."""

from __future__ import annotations

from harness.judge.expected import unjudged_amounts
from harness.judge.wording import ranks
from harness.report.formats import megabytes, percent
from harness.report.short.stage import Stage, peak
from harness.report.short.words import levels, names, sentence


def memory_sentence(stage: Stage) -> str:
    """Peak and model states per rank, as far as they were measured."""
    return sentence(*_peaks(stage), *_states(stage))


def _peaks(stage: Stage) -> list[str]:
    found = levels(stage.figures(peak), megabytes)
    if not found:
        return ["peak memory was not measured"]
    (least, value), (most, largest) = found[0], found[-1]
    if len(found) == 1:
        return [f"every cell peaks at {megabytes(value)} MB per rank on {ranks(stage.size)}"]
    verb = "peaks" if len(least) == 1 else "peak"
    base = stage.base and peak(stage.base)
    related = f", {percent(value / base)} of ddp's {megabytes(base)} MB" if base and base != value else ""
    return [
        f"least memory on {ranks(stage.size)}: {names(least)} {verb} at {megabytes(value)} MB per rank"
        f"{related}",
        *([f"most: {names(most)} at {megabytes(largest)} MB"] if base != largest else []),
    ]


def _states(stage: Stage) -> list[str]:
    found = levels(stage.figures(lambda group: group.median("model_state_bytes")), megabytes)
    if not found:
        return []
    least, value = found[0]
    groups = [g for g in stage.groups if g.median("expected_model_state_bytes") is not None]
    off = [
        group.label
        for group in groups
        if group.median("expected_model_state_bytes") != group.median("model_state_bytes")
    ]
    text = f"model states are smallest under {names(least)}, {megabytes(value)} MB"
    if len(found) == 1:
        text = f"model states are {megabytes(value)} MB"
    if off:
        return [text, f"states differ from the closed form in {names(off)}"]
    without = [group.label for group in stage.groups if unjudged_amounts(group.record)]
    equal = f"all {'other ' if without else ''}states equal the closed form to the byte"
    unknown = [f"no closed form for {names(without)}"] if without else []
    return [text, *([equal] if groups else []), *unknown]
