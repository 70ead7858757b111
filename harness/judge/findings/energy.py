"""Energy that cannot be right: more power than the device may draw, or samples that deny the counter."""

from __future__ import annotations

from harness.judge.energy import mean_watts
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record import EnergyPart, RankPart

LIMIT_MARGIN = 1.1
"""A GPU holds its power limit on average over seconds; the counter is accurate to 5 %."""
SAMPLES_MARGIN = 0.25
"""Samples are those of the driver's buffer, which may hold only the last seconds of the run."""


def find(runs: Runs) -> list[Finding]:
    """At most one per run: of its first rank whose energy cannot be right."""
    return of_cells(runs, _implausible)


def _implausible(row: Row) -> Finding | None:
    for rank in row.record.ranks:
        why = _why(rank.energy) if rank.energy is not None else None
        if why is not None:
            return Finding(
                id="implausible-energy", about=row.cell, text=f"GPU of rank {rank.rank}: {why}",
                values=_values(rank),
            )  # fmt: skip
    return None


def _why(part: EnergyPart) -> str | None:
    watts = mean_watts(part.device_joules, part.seconds)
    if watts is None:
        return None
    limit, sampled = part.device_limit_watts, part.device_sampled_watts
    if limit is not None and watts > LIMIT_MARGIN * limit:
        return f"{watts:.0f} W on average, its power limit is {limit:.0f} W"
    if sampled is not None and abs(watts - sampled) > SAMPLES_MARGIN * sampled:
        return f"{watts:.0f} W by its energy counter, {sampled:.0f} W by its power samples"
    return None


def _values(rank: RankPart) -> dict[str, object]:
    return {"rank": rank.rank, **(rank.energy.model_dump() if rank.energy else {})}
