"""Conditions under which a change fails a continuous integration: peak_bytes>+5%,tokens_per_second<-3%."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.backends.explain import choices
from harness.compare.cell import Cell
from harness.compare.changes import Change, Pair, changes, pairs
from harness.compare.comparison import Comparison
from harness.compare.metrics import metrics_in
from harness.errors import HarnessError

EXAMPLE = "peak_bytes>+5%,tokens_per_second<-3%"
DOUBTS = {
    "not judged": "; too few runs to tell it from noise",
    "inconclusive": "; beyond noise by the test, but the runs of both sides overlap",
}
_CONDITION = re.compile(r"\s*(\w+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class Condition:
    """Fails where a measure rises above, or falls below, so much relative to the baseline."""

    measure: str
    above: bool
    relative: float

    def __str__(self) -> str:
        return f"{self.measure}{'>' if self.above else '<'}{self.relative * 100:+g}%"

    def met_by(self, change: Change) -> bool:
        """Whether a change is beyond the limit; one within the noise is not, one not judged may be."""
        if change.judgement in ("within noise", "equal") or change.relative is None:
            return False
        return change.relative > self.relative if self.above else change.relative < self.relative


def parse_conditions(text: str) -> list[Condition]:
    """Read comma-separated conditions. Raises HarnessError for what is none."""
    found = []
    for piece in text.split(","):
        match = _CONDITION.fullmatch(piece)
        if match is None:
            raise HarnessError(
                f"--fail-on was given '{piece.strip()}'; a condition is a measure, < or >, and percent of "
                f"change with its sign, as in {EXAMPLE}"
            )
        measure, sign, percent = match.groups()
        known = [metric.key for metric in metrics_in("changes")]
        if measure not in known:
            raise HarnessError(
                f"--fail-on: measure '{measure}' is unknown. Available: {choices(measure, known)}"
            )
        limit = float(percent) / 100
        if (sign == ">" and limit < 0) or (sign == "<" and limit > 0):
            raise HarnessError(
                f"--fail-on was given '{piece.strip()}', which no change at all would meet; write > with a "
                f"rise and < with a fall, as in {EXAMPLE}"
            )
        found.append(Condition(measure=measure, above=sign == ">", relative=limit))
    return found


def failures(conditions: Sequence[Condition], before: Comparison, after: Comparison) -> list[str]:
    """What fails, in a line each: a condition that is met, and a result that the baseline had and is gone.

    A condition that cannot be checked fails too: silence would look like success.
    """
    lines = [line for pair in pairs(before, after) if (line := _lost(pair)) is not None]
    for change in changes(before, after):
        for condition in conditions:
            if condition.measure != change.key:
                continue
            where = Cell(change.backend, change.world_size)
            if condition.met_by(change):
                doubt = DOUBTS.get(change.judgement, "")
                lines.append(
                    f"{where}: {change.key} changed by {(change.relative or 0) * 100:+.1f} %, from "
                    f"{change.before:g} to {change.after:g} ({condition}){doubt}"
                )
            elif change.before is not None and change.after is None:
                lines.append(f"{where}: {change.key} is n/a now, {change.before:g} before ({condition})")
            elif change.before == 0 and change.after and condition.above:
                lines.append(f"{where}: {change.key} was 0, is {change.after:g} ({condition})")
    for condition in conditions:
        if not any(c.before is not None for c in changes(before, after) if c.key == condition.measure):
            lines.append(f"{condition} could not be checked: no cell of both sides has the measure")
    return lines


def _lost(pair: Pair) -> str | None:
    """A cell that had a whole result before and has none now."""
    if pair.before is None or not pair.before.succeeded:
        return None
    title = pair.before.cell
    if pair.after is None:
        return f"{title}: is in the baseline and not in the other records"
    if not pair.after.succeeded:
        return f"{title}: was ok, is {pair.after.status}"
    if any(not row.is_comparable for row in pair.after.rows):
        return f"{title}: is not the same job as the others any more"
    return None
