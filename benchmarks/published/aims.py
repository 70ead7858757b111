"""What predictions of published runs should reach, and what they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tabulate import tabulate

from benchmarks.published.judge import FULLY_SPECIFIED, Judged, order, summarize
from benchmarks.published.judge import by_source as mean_of_sources

LARGE_GROUP = 10
"""Runs of which a group's bias is counted."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A figure and its bound."""

    name: str
    bound: float
    found: float | None
    of: str
    """What it was counted over, or where it was reached."""
    at_least: bool = False
    """Whether the bound is the least; else it is the most."""

    @property
    def is_reached(self) -> bool:
        if self.found is None:
            return False
        return self.found >= self.bound if self.at_least else self.found <= self.bound


def table(aims: Sequence[Aim]) -> str:
    """A line for each."""
    rows = [
        [
            aim.name,
            f"{'at least' if aim.at_least else 'at most'} {aim.bound:.0%}",
            "n/a" if aim.found is None else f"{aim.found:.1%}",
            aim.of,
            "yes" if aim.is_reached else "no",
        ]
        for aim in aims
    ]
    return tabulate(rows, ["figure", "aim", "found", "over", "reached"], tablefmt="github") + "\n"


def aims_of(
    judged: Sequence[Judged],
    ordered: Sequence[Judged],
    biases: Mapping[str, Sequence[Judged]],
    collectives: Sequence[float],
) -> Iterator[Aim]:
    """biases: runs by group, of any size; collectives: errors of their times."""
    full = [one for one in judged if one.row.tier == FULLY_SPECIFIED and not one.is_adapted]
    whole, of_full = summarize(judged), summarize(full)
    of_adapted = summarize([one for one in judged if one.is_adapted])
    asked, rows = whole.asked
    yield Aim(name="runs that can be asked", bound=0.85, found=asked / rows, of=f"{rows} runs", at_least=True)
    worst = max(full, key=lambda one: abs(one.memory_error or 0), default=None)
    counted = f"{len(of_full.memory)} runs of full training, fully specified"
    yield Aim(name="memory, mean", bound=0.04, found=of_full.memory_mean, of=counted)
    yield Aim(name="memory, worst", bound=0.12, found=of_full.memory_worst, of=worst.row.id if worst else "")
    counted = f"{len(of_adapted.memory)} runs of LoRA and QLoRA"
    yield Aim(name="memory of adapters, mean", bound=0.08, found=of_adapted.memory_mean, of=counted)
    counted = f"{len(whole.fits)} answers"
    yield Aim(name="right about what fits", bound=0.95, found=whole.fits_share, of=counted, at_least=True)
    yield Aim(name="speed, median", bound=0.10, found=whole.speed_median, of=f"{len(whole.speed)} runs")
    name, bias = largest_bias(biases)
    yield Aim(name="bias in speed of any group, most", bound=0.25, found=bias, of=name)
    everything = [*judged, *ordered]
    for quantity in ("speed", "memory"):
        found = order(everything, quantity)  # type: ignore[arg-type]
        pairs = sum(count for _, count in found.values())
        yield Aim(
            name=f"order in {quantity}", bound=0.85, found=mean_of_sources(found), at_least=True,
            of=f"{pairs} pairs, mean of {len(found)} sources",
        )  # fmt: skip
    error = median(map(abs, collectives)) if collectives else None
    yield Aim(
        name="collectives, median", bound=0.15, found=error, of=f"{len(collectives)} times of nccl-tests"
    )


def largest_bias(groups: Mapping[str, Sequence[Judged]]) -> tuple[str, float | None]:
    """The group of ten runs or more whose median error in speed is largest, and that, without its sign."""
    found = {}
    for name, runs in groups.items():
        errors = [one.speed_error for one in runs if one.speed_error is not None]
        if len(errors) >= LARGE_GROUP:
            found[name] = abs(median(errors)), f"{name}: {len(errors)} runs"
    if not found:
        return "", None
    bias, text = max(found.values())
    return text, bias
