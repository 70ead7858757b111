"""One comparison of a tiny job, shared by the tests of several commands."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.made_once import MadeOnce

from .command_line import SHORT, harness


@dataclass
class Compared:
    folder: Path
    runs: Path
    arguments: list[str]
    done: subprocess.CompletedProcess[str]


ARGUMENTS = ["compare", "--backends", "ddp,zero1", "--nproc", "2", *SHORT]


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory, made_once: MadeOnce) -> Compared:
    """One comparison of a tiny job, shared: compare --json --report. Each worker has its files."""

    def compare() -> tuple[subprocess.CompletedProcess[str], dict[Path, bytes]]:
        made = tmp_path_factory.mktemp("compared")
        done = harness(*ARGUMENTS, "--json", "--report", "report.md", cwd=made)
        return done, {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}

    folder = tmp_path_factory.mktemp("comparison")
    done, files = made_once.value("comparison", compare)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return Compared(folder, folder / "runs", ARGUMENTS, done)
