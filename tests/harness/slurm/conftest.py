"""A fake Slurm on PATH."""

import os
from pathlib import Path

import pytest

from tests.harness.slurm.fakes import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    return fake
