"""The loss curves of cells, each with its difference to the reference and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from harness.judge.comparison import Comparison
from harness.judge.repeats import Repeats

Curve = dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """The losses of one cell, medians over its runs."""

    group: Repeats
    losses: Curve
    differences: Curve
    """Empty for the reference, and without one."""

    @property
    def verdict(self) -> str:
        """'agrees', 'diverged' or 'not judged'."""
        parity = self.group.parity
        return {"diverged": "diverged", "unjudged": "not judged"}.get(parity, "agrees")

    @property
    def largest(self) -> float:
        """Largest difference to the reference."""
        return max(map(abs, self.differences.values()), default=0.0)

    @property
    def limit(self) -> float | None:
        """Largest difference of a loss that its level allows."""
        row = next((row for row in self.group.rows if row.noise is not None), None)
        if row is None or row.noise is None:
            return None
        limits = row.noise.widest(row.record) if self.group.parity == "band" else row.noise.tight
        return limits.loss


def loss_lines(comparison: Comparison) -> list[Line]:
    """Of every cell with a finite loss, in their order."""
    groups = comparison.groups
    references = {group.record.job_id: _losses(group) for group in reversed(groups) if group.is_reference}
    lines = []
    for group in groups:
        losses = _losses(group)
        expected = {} if group.is_reference else references.get(group.record.job_id, {})
        if losses:
            differences = {step: loss - expected[step] for step, loss in losses.items() if step in expected}
            lines.append(Line(group=group, losses=losses, differences=differences))
    return lines


def _losses(group: Repeats) -> Curve:
    """Median loss of each step over the repeats that reached it with a finite loss."""
    found: dict[int, list[float]] = {}
    for row in group.rows:
        for step in row.record.steps:
            if step.loss is not None:
                found.setdefault(step.step, []).append(step.loss)
    return {step: median(losses) for step, losses in found.items()}
