"""What a comparison of some records finds of some kinds."""

from collections.abc import Iterable

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.record import Record


def told(records: Iterable[Record], *kinds: str) -> list[Finding]:
    """Findings whose ids begin with one of these."""
    return [finding for finding in Comparison(records).findings if finding.id.startswith(kinds)]
