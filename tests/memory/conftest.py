"""Comparisons on real ranks, of a tiny model, for what they say of memory."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.record import Record
from harness.record.store import read_runs
from tests import kept
from tests.harness.cli.command_line import succeeds
from tests.made_once import MadeOnce
from tests.plugins import register

LLAMA = (
    "{hidden_size: 36, intermediate_size: 52, num_hidden_layers: 3, num_attention_heads: 3, "
    "num_key_value_heads: 3}"
)
SETTINGS = (
    "training.steps=4", "measure.warmup_steps=1", "measure.probed_steps=3", "measure.traced_steps=0",
    "measure.weight_digests=false", "data.sequence_length=16", "training.global_batch_size=8",
    "data.limit=64", "compare.noise_runs=false",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a comparison said, its records by backend, and where they lie."""

    folder: Path
    document: dict[str, Any]
    records: dict[str, Record]

    def findings(self, name: str) -> list[dict[str, Any]]:
        return [finding for finding in self.document["findings"] if finding["id"] == name]

    def parameters(self, name: str) -> int:
        model = self.records[name].model
        return model.parameters


def compare(
    folder: Path, backends: str, ranks: int, *settings: str, entry_points: dict[str, str] | None = None
) -> Outcome:
    """Run `harness compare --json`; `entry_points` registers further backends for it.

    It finds the runs of built-in backends that an earlier session left, as long as what runs has not changed.
    """
    if entry_points:
        register(folder, entry_points)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)
            return _compare(folder, backends, ranks, *settings)
    name = hashlib.sha256(f"{backends} {ranks} {settings}".encode()).hexdigest()[:16]
    with kept.runs().place(f"compared-{name}") as place:
        if place.exists():
            shutil.copytree(place, folder / "runs")
        outcome = _compare(folder, backends, ranks, *settings)
        if not place.exists():
            kept.runs().fill(place, folder / "runs")
    return outcome


def _compare(folder: Path, backends: str, ranks: int, *settings: str) -> Outcome:
    command = ["compare", "--json", "--backends", backends, "--nproc", str(ranks), "--runs", "runs"]
    for setting in (*SETTINGS, *settings):
        command += ["--set", setting]
    done = succeeds(*command, cwd=folder)
    runs, problems = read_runs([folder / "runs"])
    assert problems == []
    return Outcome(folder, json.loads(done.stdout), {record.backend.label: record for _, record in runs})


MICRO_STEPS = 4
EACH = "fsdp:sync_each_batch=True"
SAVING = ("ddp", "zero1", "zero2", "zero3", "fsdp", EACH, "fsdp1")


@pytest.fixture(scope="session")
def outcome(made_once: MadeOnce, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Of two ranks that add up micro-steps, and save a checkpoint in the end."""
    settings = (
        f"model.config={LLAMA}", f"training.accumulation_steps={MICRO_STEPS}", "measure.checkpoint=true",
    )  # fmt: skip
    return made_once.value(
        "memory", lambda: compare(tmp_path_factory.mktemp("memory"), ",".join(SAVING), 2, *settings)
    )
