"""All findings: the modules that look for them, and what each kind means.

A module has `find(runs) -> list[Finding]`, a pure function of the runs. To add one, write it, name it in
MODULES and explain its kinds in `docs/findings.md`, which every installation brings (`findings.md` here).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
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
PAGE = Path(__file__).with_name("findings.md")
ENTRY = re.compile(
    r"^## (?P<id>\S+)\n\n(?P<title>.+)\.\n\n"
    r"- Cause: (?P<cause>.+)\n- Confirm: (?P<confirm>.+)\n- Fix: (?P<fix>.+)$",
    re.MULTILINE,
)


def find_all(runs: Runs) -> list[Finding]:
    """Every finding of a comparison, whose `findings` they are."""
    return [finding for module in MODULES for finding in module.find(runs)]


@cache
def kinds() -> dict[str, Kind]:
    """Every kind of finding by its id, in the order of the report: the entries of `docs/findings.md`."""
    entries = (entry.groupdict() for entry in ENTRY.finditer(PAGE.read_text(encoding="utf-8")))
    return {entry["id"]: Kind(**entry) for entry in entries}
