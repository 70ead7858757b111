"""A report in every format, written once, and a copy of it for each test that edits it."""

import shutil
from pathlib import Path

import pytest

from harness.tell.report import write_report
from tests.harness.tell.published import write_runs


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    runs = write_runs(folder)
    for suffix in ("md", "html", "csv", "json", "tex"):
        write_report(runs, folder / f"report.{suffix}", folders=[folder / "runs"])
    return folder


@pytest.fixture
def copy(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "copy"))
