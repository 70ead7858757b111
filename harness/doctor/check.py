"""The self-check: a tiny job under every backend must agree, and three planted defects must be named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends import registry
from harness.cells import modules_to_preload, plan, run_cell
from harness.compare.findings.catalogue import find_all
from harness.compare.findings.finding import Finding
from harness.compare.rows import Row, make_rows, reason
from harness.config import load_experiment
from harness.launch.local import LocalLauncher
from harness.record import Record
from harness.store import Store

SETTINGS = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16}",
    "data.sequence_length=16", "data.limit=64", "training.steps=6", "training.global_batch_size=8",
    "schedule.warmup_steps=1", "measure.warmup_steps=1", "measure.counted_steps=2",
    "runtime.threads_per_rank=1", "runtime.timeout_seconds=120",
)  # fmt: skip
MUST_BE_NAMED = {
    "planted-gradients-summed": "gradient-scale",
    "planted-wrong-beta2": "update-differs",
    "planted-stale-weights": "replicas-differ",
}
ABOUT_TIME = frozenset(
    {
        "faster-than-possible", "inconsistent-timing", "instrumented-timing", "nothing-timed", "slow-data",
        "slow-rank", "warmup-too-short",
    }
)  # fmt: skip
"""Findings about speed: a run of six steps says nothing of it."""


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """What the self-check saw."""

    rows: list[Row]
    """The clean matrix."""
    false: list[Finding]
    """Findings on it, which should not be."""
    failed: dict[str, str]
    """Backends that did not finish, and why."""
    missed: dict[str, str]
    """Planted defects that were not named, and what was said instead."""

    @property
    def trusted(self) -> bool:
        return not (self.false or self.failed or self.missed)


def self_check(folder: Path, device: str, ranks: int, said: Callable[[str], None]) -> SelfCheck:
    """Run the clean matrix and the planted defects on `ranks` ranks; records go to `folder`."""
    experiment = load_experiment(None, SETTINGS)
    store = Store(folder)
    store.prepare()
    clean = [
        name
        for name, entry in registry.entries().items()
        if entry.target.startswith("backends.") and name != registry.REFERENCE
    ]
    cells = plan(experiment, [*clean, *MUST_BE_NAMED], [ranks], 1, device)
    launcher = LocalLauncher(device, modules_to_preload(experiment, [cell.backend for cell in cells]))
    records: list[Record] = []
    for cell in cells:
        said(f"{cell.backend} on {cell.world_size}")
        command = ["harness", "doctor"]
        records.append(run_cell(cell, experiment, store, launcher, command=command, on_event=lambda _: None))
    sound = make_rows(r for r in records if r.backend.name not in MUST_BE_NAMED)
    return SelfCheck(
        rows=sound,
        false=[f for f in find_all(sound) if f.id not in ABOUT_TIME],
        failed={
            r.backend.label: reason(r) or r.status for r in records if r.status not in ("ok", "unsupported")
        },
        missed=_missed(records),
    )


def _missed(records: list[Record]) -> dict[str, str]:
    missed = {}
    for name, wanted in MUST_BE_NAMED.items():
        own = [r for r in records if r.backend.name in (name, registry.REFERENCE)]
        said = [f.id for f in find_all(make_rows(own)) if f.backends == (name,)]
        if wanted not in said:
            missed[name] = ", ".join(said) or "nothing"
    return missed


def document(check: SelfCheck, known: list[Any]) -> dict[str, Any]:
    """The document of `doctor --json`."""
    return {
        "trusted": check.trusted,
        "backends": [
            {
                "name": row.record.backend.name,
                "status": row.record.status,
                "reason": reason(row.record),
                "parity": row.judgement.parity,
            }
            for row in check.rows
        ],
        "known_traps": [{"package": t.package, "trap": t.trap, "here": t.here} for t in known],
        "self_check": {
            "cells": len(check.rows),
            "false_findings": [f.as_json() for f in check.false],
            "failed": check.failed,
            "planted": len(MUST_BE_NAMED),
            "missed": check.missed,
        },
    }
