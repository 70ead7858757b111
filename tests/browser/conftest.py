"""One browser and one report for all tests of a process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.record.store import write_record
from harness.tell.report import write_report

from .report import records

if TYPE_CHECKING:
    from .browser import Browser


@pytest.fixture(scope="session")
def window() -> "Iterator[Browser]":
    try:
        from .browser import Browser, unmet
    except ImportError as error:
        why_not: str | None = f"{error}: pip install -e '.[dev]'"
    else:
        why_not = unmet()
    if why_not is not None:
        # Where a browser is required, its absence is no reason to pass without testing.
        (pytest.fail if os.environ.get("REQUIRE_BROWSER") else pytest.skip)(f"no browser: {why_not}")
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runs = []
    for number, record in enumerate(records()):
        directory = folder / "runs" / str(number)
        directory.mkdir(parents=True)
        runs.append((write_record(directory, record), record))
    return write_report(runs, folder / "report.html")


@pytest.fixture
def browser(window: "Browser", page: Path) -> "Browser":
    """The browser with the report open."""
    window.open(page)
    return window
