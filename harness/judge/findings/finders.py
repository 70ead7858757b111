"""All findings: the rules of the modules beside this one, held against all runs of a comparison.

To add one, write it in one of these modules, name it in that module's `RULES`, and give its kind an entry in
`findings.toml`, which has its sentence and its place in reports.
"""

from __future__ import annotations

from harness.judge.catalogue import entries
from harness.judge.findings import communication, execution, jobs, memory, timing, training
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.rows import Runs

RULES = tuple(one.RULES for one in (jobs, execution, training, communication, memory, timing))


def find_all(runs: Runs) -> list[Finding]:
    """Every finding of a comparison, whose `findings` they are, in the order of the catalogue."""
    told: list[Finding] = []
    for rules in RULES:
        told += [finding for rule in rules.of_runs for row in runs.rows for finding in rule(row)]
        told += [finding for rule in rules.of_cells for finding in of_cells(runs, rule)]
        told += [finding for look in rules.of_all for finding in look(runs)]
    order = {kind: place for place, kind in enumerate(entries())}
    return sorted(told, key=lambda finding: order[finding.id])
