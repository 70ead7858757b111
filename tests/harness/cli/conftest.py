"""One comparison of a tiny job, shared by the tests of several commands."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from .command_line import SHORT, harness


@dataclass
class Comparison:
    folder: Path
    runs: Path
    arguments: list[str]
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """One comparison of a tiny job, shared: compare --json --report."""
    folder = tmp_path_factory.mktemp("comparison")
    arguments = ["compare", "--backends", "ddp,zero1", "--nproc", "2", *SHORT]
    done = harness(*arguments, "--json", "--report", "report.md", cwd=folder)
    return Comparison(folder, folder / "runs", arguments, done)
