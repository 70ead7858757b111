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
    completeness,
    divergence,
    execution,
    given_settings,
    memory,
    other_jobs,
    own_jobs,
    precision,
    settings,
    timing,
    updates,
)
from harness.judge.findings.finding import Finding, Kind
from harness.judge.rows import Runs

FINDERS: tuple[Callable[[Runs], list[Finding]], ...] = (
    other_jobs.find_other_jobs,
    own_jobs.find_observed,
    execution.find_passes,
    execution.find_modes,
    execution.find_buffers,
    execution.find_unlike_ranks,
    given_settings.find_given,
    divergence.find_pipeline,
    settings.find_settings,
    given_settings.find_versions,
    given_settings.find_launcher,
    precision.find_precisions,
    precision.find_layers,
    settings.find_muon,
    precision.find_fp8,
    precision.find_stale_weights,
    updates.find_altered_updates,
    divergence.find_diverged,
    divergence.find_held_out,
    communication.find_volumes,
    settings.find_cost_settings,
    communication.find_frozen,
    precision.find_low_bit,
    other_jobs.find_batch_split,
    own_jobs.find_own_jobs,
    completeness.find_completeness,
    timing.find_too_short,
    timing.find_impossible,
    timing.find_energy,
    timing.find_warmup,
    timing.find_machine,
    timing.find_instrumentation,
    balance.find_slow_ranks,
    timing.find_data_loading,
    memory.find_memory,
    communication.find_wrap_units,
    own_jobs.find_labels,
    divergence.find_answers,
    other_jobs.find_weak_scaling,
)
PAGE = Path(__file__).with_name("findings.md")
ENTRY = re.compile(
    r"^## (?P<id>\S+)\n\n(?P<title>.+)\.\n\n"
    r"- Cause: (?P<cause>.+)\n- Confirm: (?P<confirm>.+)\n"
    r"(- Reported: (?P<reported>.+)\n)?- Fix: (?P<fix>.+)$",
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
