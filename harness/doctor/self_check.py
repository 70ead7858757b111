"""The self-check: a tiny job under every backend must agree, and injected faults must be named."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends import registry
from harness.backends.libraries.facts import LibraryFact, not_installed
from harness.job.config import load_experiment
from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.judge.rows import JudgedRun, reason
from harness.launch.cells import plan
from harness.launch.launcher import LocalLauncher, modules_to_preload, run_cell
from harness.record import Record
from harness.record.store import Store

BETWEEN_RANKS = {
    "planted-gradients-summed": "gradient-scale",
    "planted-wrong-beta2": "update-differs",
    "planted-stale-weights": "replicas-differ",
}
"""Backends with an injected fault, and the finding that must name it."""
ON_ONE_RANK = {
    "planted-divided-again": "gradient-scale",
    "planted-wrong-beta2": "update-differs",
    "planted-left-out": "parameters-not-updated",
}


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What is tried, in this order, and what is not."""

    first: tuple[str, ...]
    """Backends that are tried whatever the time."""
    rest: tuple[str, ...]
    """Backends that are tried while there is time."""
    faults: Mapping[str, str]
    """As `BETWEEN_RANKS`."""
    left_out: Mapping[str, str]
    """What is not tried, and why."""


def cover(names: Sequence[str], ranks: int, installed: Collection[str]) -> Coverage:
    """What to try on so many ranks: the backends named, else all that come with this project.

    `installed` holds the distributions that are there.
    """
    known = names or [
        name
        for name, entry in registry.entries().items()
        if not entry.is_third_party and name != registry.REFERENCE
    ]
    left_out = {name: why for name in known if (why := _obstacle(name, ranks, installed)) is not None}
    wanted = [name for name in known if name not in left_out]
    if ranks == 1:
        left_out["reduction and sharding over ranks"] = "these need two ranks"
    first = wanted if names else [name for name in wanted if registry.BUILT_IN[name].in_short_check]
    return Coverage(
        first=tuple(first),
        rest=tuple(name for name in wanted if name not in first),
        faults=BETWEEN_RANKS if ranks > 1 else ON_ONE_RANK,
        left_out=left_out,
    )


def _obstacle(name: str, ranks: int, installed: Collection[str]) -> str | None:
    entry, _ = registry.parse(name)
    missing = [package for package in entry.packages if package not in installed]
    if missing:
        return not_installed(missing)
    if entry.strategy is not None and entry.strategy.multiplies_gradients and ":" not in name:
        return (
            "its gradients are too large as DeepSpeed makes them (gradient-scale); "
            f"name {name}:correct_gradients=true"
        )
    if ranks == 1 and (kind := entry.strategy) is not None:
        # Hybrid sharding says by itself that one rank is too few; Accelerate's FSDP that it needs a device.
        native = kind.route == "native" and not kind.of_family.shards_one_rank
        if native and kind.stage > 0 and not kind.facts.has_replicas:
            return "FSDP1 takes NO_SHARD on one rank whatever was asked"
    return None


SETTINGS = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16}",
    "data.sequence_length=16", "data.limit=64", "training.steps=6", "training.global_batch_size=8",
    "training.accumulation_steps=2", "schedule.warmup_steps=1", "measure.warmup_steps=1",
    "measure.probed_steps=2", "measure.traced_steps=0", "runtime.threads_per_rank=1",
    "runtime.timeout_seconds=120", "compare.question=parity",
)  # fmt: skip
"""No step is traced: that would take a tenth of a second in each cell and has no part in what is judged."""
BUDGET_SECONDS = 100.0
"""After these no further backend is tried, so that the last one still ends within two minutes."""
OUT_OF_TIME = "out of time (two minutes); name it with --backends"
ABOUT_TIME = frozenset({"busy-machine", "cores-shared", "slow-data", "slow-rank", "warmup-too-short"})
"""Findings about the machine and how steady steps are: a run of six steps says nothing of it."""


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """What the self-check saw."""

    rows: list[JudgedRun]
    """The clean matrix."""
    false: list[Finding]
    """Findings on it, which should not be."""
    failed: dict[str, str]
    """Backends that did not finish, and why."""
    missed: dict[str, str]
    """Injected faults that were not named, and what was reported instead."""
    planted: int
    """Faults that were injected."""
    not_covered: dict[str, str]
    """What was not tried, and why."""

    @property
    def tried(self) -> list[str]:
        """Backends that ran and were judged by the reference."""
        return [
            row.label
            for row in self.rows
            if row.record.status == "ok" and row.record.backend.name != registry.REFERENCE
        ]

    @property
    def trusted(self) -> bool:
        """Whether something ran, and nothing is off."""
        return bool(self.tried) and not (self.false or self.failed or self.missed)


def self_check(
    folder: Path, device: str, ranks: int, coverage: Coverage, report: Callable[[str], None]
) -> SelfCheck:
    """Run the clean matrix and the injected faults on `ranks` ranks; records go to `folder`."""
    ends = time.monotonic() + BUDGET_SECONDS
    experiment = load_experiment(None, SETTINGS)
    store = Store(folder)
    store.prepare()
    cells = plan(experiment, [*coverage.first, *coverage.faults, *coverage.rest], [ranks], 1, device)
    launcher = LocalLauncher(device, modules_to_preload(experiment, [cell.backend for cell in cells]))
    records: list[Record] = []
    not_covered = dict(coverage.left_out)
    for cell in cells:
        if cell.backend in coverage.rest and time.monotonic() > ends:
            not_covered[cell.backend] = OUT_OF_TIME
            continue
        report(f"{cell.backend} on {cell.world_size}")
        records.append(run_cell(cell, store, launcher, command=["harness", "doctor"]))
    return conclude(records, coverage.faults, not_covered)


def conclude(records: Sequence[Record], faults: Mapping[str, str], not_covered: dict[str, str]) -> SelfCheck:
    """What these runs say: the clean ones must agree without a finding, each fault must have its own."""
    sound = Comparison(r for r in records if r.backend.name not in faults)
    missed = {}
    for backend, finding in faults.items():
        own = [r for r in records if r.backend.name in (backend, registry.REFERENCE)]
        named = [f.id for f in Comparison(own).findings if f.backends == (backend,)]
        if finding not in named:
            missed[backend] = f"it was not found as {finding}: found {', '.join(named) or 'nothing'}"
    return SelfCheck(
        rows=sound.rows,
        false=[finding for finding in sound.findings if finding.id not in ABOUT_TIME],
        failed={
            r.backend.label: reason(r) or r.status for r in records if r.status not in ("ok", "unsupported")
        },
        missed=missed,
        planted=len(faults),
        not_covered=not_covered,
    )


def document(check: SelfCheck, known: Sequence[LibraryFact]) -> dict[str, Any]:
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
        "not_covered": check.not_covered,
        "known_traps": [{"package": t.library, "trap": t.what, "here": t.handled} for t in known],
        "self_check": {
            "cells": len(check.rows),
            "false_findings": [f.as_json() for f in check.false],
            "failed": check.failed,
            "planted": check.planted,
            "missed": check.missed,
        },
    }
