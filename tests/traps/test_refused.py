"""Traps that would train another model or hang: rows refused by name, and nothing runs."""

import os
import time
from pathlib import Path

import pytest

from harness.backends.libraries.facts import CPU_ADAM
from harness.backends.zero.extension_builds import QUIET_SECONDS, build_folder
from harness.judge.rows import reason
from harness.record.store import read_runs
from tests.harness.cli.command_line import SHORT, harness_process

pytestmark = pytest.mark.long(seconds=10)

SAYS = {
    "zero2:adam=deepspeed,offload=optimizer": (CPU_ADAM, "no process holds it", "remove it"),
}
"""The lock of a build that was killed."""


@pytest.mark.costly
def test_each_is_a_row_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extensions = tmp_path / "extensions"
    extensions.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    lock = build_folder(CPU_ADAM) / "lock"
    lock.touch()
    old = time.time() - 2 * QUIET_SECONDS
    for path in (lock, lock.parent):
        os.utime(path, (old, old))
    words = ["compare", "--backends", ",".join(SAYS), "--nproc", "2", *SHORT, "--runs", "runs"]
    done = harness_process(*words, cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(extensions))
    assert done.returncode == 0, done.stderr
    records = {record.backend.label: record for _, record in read_runs([tmp_path / "runs"])[0]}
    for label, says in SAYS.items():
        record = records[label]
        assert record.status == "unsupported", label
        why = reason(record) or ""
        assert all(part in why for part in says), why
        assert not record.steps
    assert done.stderr.count("unsupported: ") == len(SAYS)
