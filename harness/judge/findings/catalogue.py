"""All findings: the modules that look for them, and what each kind means.

A module has KINDS and `find(runs) -> list[Finding]`, a pure function of the runs. To add one, write it
and name it in MODULES; `docs/findings.md` follows from KINDS.
"""

from __future__ import annotations

from types import ModuleType

from harness.judge.findings import (
    answers,
    balance,
    batch_split,
    communication,
    completeness,
    cost_settings,
    data_loading,
    divergence,
    energy,
    fp8,
    frozen,
    given,
    held_out,
    impossible,
    instrumentation,
    job_equivalence,
    labels,
    launcher,
    low_bit,
    machine,
    memory,
    muon,
    observed,
    own_jobs,
    pipeline,
    precision,
    settings,
    stale_weights,
    swapped,
    timing,
    versions,
    warmup,
    weak_scaling,
    wrap_units,
)
from harness.judge.findings.finding import Finding, Kind
from harness.judge.repeats import Runs

MODULES: tuple[ModuleType, ...] = (
    job_equivalence,
    observed,
    given,
    pipeline,
    settings,
    versions,
    launcher,
    precision,
    muon,
    fp8,
    stale_weights,
    divergence,
    held_out,
    communication,
    cost_settings,
    frozen,
    low_bit,
    swapped,
    batch_split,
    own_jobs,
    completeness,
    timing,
    impossible,
    energy,
    warmup,
    machine,
    instrumentation,
    balance,
    data_loading,
    memory,
    wrap_units,
    labels,
    answers,
    weak_scaling,
)
"""In the order of the report."""


def find_all(runs: Runs) -> list[Finding]:
    """Every finding of a comparison, whose `findings` they are."""
    return [finding for module in MODULES for finding in module.find(runs)]


def kinds() -> dict[str, Kind]:
    """Every kind of finding by its id."""
    return {kind.id: kind for module in MODULES for kind in module.KINDS}


def explain() -> str:
    """The text of `docs/findings.md`."""
    parts = [
        "# Findings",
        "Warnings that `compare` and the report print with the numbers. Ids are stable; `compare --json` "
        "lists them under `findings`, each with the backends it is about and the values behind it.",
        "Generated from the catalogue in `harness/judge/findings`; `pytest --update-golden` rewrites it.",
    ]
    for kind in kinds().values():
        parts += [
            f"## {kind.id}",
            f"{kind.title}.",
            f"- Cause: {kind.cause}\n- Confirm: {kind.confirm}\n- Fix: {kind.fix}",
        ]
    return "\n\n".join(parts) + "\n"
