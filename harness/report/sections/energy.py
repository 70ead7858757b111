"""Energy of the timed steps, and what 1e9 tokens cost at the price that the user gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.energy import Usage, usage
from harness.judge.repeats import Repeats
from harness.report.document import Block, Column, Paragraph, Section, Table
from harness.report.formats import number
from harness.report.tables import LABELS
from harness.spec import Price

FIGURES: tuple[tuple[Column, Callable[[Usage], float | None]], ...] = (
    (Column("device_watts", "GPUs W", number, optional=True), lambda found: found.device_watts),
    (Column("host_watts", "hosts W", number, optional=True), lambda found: found.host_watts),
    (
        Column("kilowatt_hours_per_billion_tokens", "kWh/1e9 tokens", number, optional=True),
        lambda found: found.kilowatt_hours,
    ),
    (
        Column("gpu_hours_per_billion_tokens", "GPU-hours/1e9 tokens", number, optional=True),
        lambda found: found.gpu_hours,
    ),
    (Column("cost_per_billion_tokens", "cost/1e9 tokens", number, optional=True), lambda found: found.cost),
)


def energy_section(comparison: Comparison) -> Section | None:
    """None where no energy is known and no cost can be stated."""
    body = [[*group.cell, *line] for group in comparison.groups if (line := _line(group)) is not None]
    if not body:
        return None
    table = Table(key="energy", columns=[*LABELS, *(column for column, _ in FIGURES)], rows=body)
    blocks: list[Block] = [table, Paragraph(_text(comparison))]
    return Section("energy", "Energy and cost", blocks)


def _line(group: Repeats) -> list[Any] | None:
    """Medians over the repeats; None where there is neither energy nor cost."""
    found = [of_run for row in group.rows if (of_run := usage(row.record)) is not None]
    if all(one.kilowatt_hours is None and one.cost is None for one in found):
        return None
    return [_median([read(one) for one in found]) for _, read in FIGURES]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) and known else None


def _text(comparison: Comparison) -> str:
    sentences = [
        "Medians over repeats. Power is energy over time from the first timed step to the end of the "
        "training; GPUs by the driver's counter (NVML), hosts by RAPL: packages and DRAM of all machines, "
        "whichever program used them. Per 1e9 tokens: at the tokens/s of the timed steps."
    ]
    prices = {row.record.price_per_gpu_hour for row in comparison.rows} - {None}
    if prices:
        listed = " or ".join(sorted(str(price) for price in prices if isinstance(price, Price)))
        sentences.append(f"Cost: GPU-hours at {listed} per hour of one GPU, as given.")
    if unknown := _unknown(comparison):
        sentences.append(f"n/a: {'; '.join(unknown)}.")
    return " ".join(sentences)


def _unknown(comparison: Comparison) -> list[str]:
    """Reasons, each once."""
    parts = [part for row in comparison.rows for rank in row.record.ranks if (part := rank.energy)]
    return sorted({why for part in parts for why in (part.device_unknown, part.host_unknown) if why})
