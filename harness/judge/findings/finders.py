"""All findings: the functions that look for them, and what each kind means.

Each is `find_NAME(runs) -> list[Finding]`, a pure function of the runs. To add one, write it, name it in
FINDERS and explain its kinds in `docs/findings.md`, which every installation brings (`findings.md` here).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from harness.judge.findings import (
    balance,
    communication,
    divergence,
    execution,
    job_equivalence,
    memory,
    own_jobs,
    precision,
    settings,
    timing,
    updates,
)
from harness.judge.findings.finding import Finding, Kind
from harness.judge.repeats import Runs

FINDERS: tuple[Callable[[Runs], list[Finding]], ...] = (
    job_equivalence.find,
    own_jobs.find_observed,
    execution.find_passes,
    execution.find_modes,
    execution.find_buffers,
    execution.find_unlike_ranks,
    settings.find_given,
    divergence.find_pipeline,
    settings.find,
    settings.find_versions,
    settings.find_launcher,
    precision.find,
    precision.find_layers,
    settings.find_muon,
    precision.find_fp8,
    precision.find_stale_weights,
    updates.find,
    divergence.find,
    divergence.find_held_out,
    communication.find,
    settings.find_cost_settings,
    communication.find_frozen,
    precision.find_low_bit,
    memory.find_swapped,
    job_equivalence.find_batch_split,
    own_jobs.find,
    job_equivalence.find_completeness,
    timing.find,
    timing.find_impossible,
    timing.find_energy,
    timing.find_warmup,
    timing.find_machine,
    timing.find_instrumentation,
    balance.find,
    timing.find_data_loading,
    memory.find,
    communication.find_wrap_units,
    own_jobs.find_labels,
    divergence.find_answers,
    balance.find_weak_scaling,
)
PAGE = Path(__file__).with_name("findings.md")
ENTRY = re.compile(
    r"^## (?P<id>\S+)\n\n(?P<title>.+)\.\n\n"
    r"- Cause: (?P<cause>.+)\n- Confirm: (?P<confirm>.+)\n- Fix: (?P<fix>.+)$",
    re.MULTILINE,
)


def find_all(runs: Runs) -> list[Finding]:
    """Every finding of a comparison, whose `findings` they are."""
    return [finding for find in FINDERS for finding in find(runs)]


@cache
def kinds() -> dict[str, Kind]:
    """Every kind of finding by its id, in the order of the report: the entries of `docs/findings.md`."""
    entries = (entry.groupdict() for entry in ENTRY.finditer(PAGE.read_text(encoding="utf-8")))
    return {entry["id"]: Kind(**entry) for entry in entries}
