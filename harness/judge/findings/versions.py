"""Versions of libraries that are known to train something else than they were asked to."""

from __future__ import annotations

from harness.backends.library_facts import FACTS, LibraryFact
from harness.judge.findings.finding import Finding
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record.workload import known_strategy


def find(runs: Runs) -> list[Finding]:
    """One finding per run and fact."""
    return [_about(row, fact) for row in runs.rows for fact in FACTS if _is_affected(row, fact)]


def _is_affected(row: Row, fact: LibraryFact) -> bool:
    record = row.record
    version, strategy = record.backend.versions.get(fact.library), known_strategy(record)
    if fact.effect != "wrong" or version is None or strategy is None or strategy.zero_stage is None:
        return False
    return fact.includes(version) and fact.concerns(
        strategy.zero_stage, record.job.training.held_precision, record.world.accumulation_steps
    )


def _about(row: Row, fact: LibraryFact) -> Finding:
    version = row.record.backend.versions[fact.library]
    return Finding(
        id="faulty-version",
        about=row.cell,
        text=f"{fact.library} {version} {fact.what} (versions {fact.versions})",
        values={"fact": fact.id, "version": version, "versions": fact.versions, "source": fact.source},
    )
