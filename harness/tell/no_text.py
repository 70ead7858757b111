"""Comparisons of jobs whose samples are no text, such as images."""

from __future__ import annotations

from harness.judge.comparison import Comparison
from harness.judge.measures import counts_samples

NO_TEXT = "tokens/s: samples/s, since samples that are no text count as one token"


def of_no_text(comparison: Comparison) -> bool:
    """Whether what is called tokens are samples."""
    records = [row.record for row in comparison.rows if row.record.steps]
    return bool(records) and all(map(counts_samples, records))
