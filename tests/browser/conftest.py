"""One browser and one report for all tests of a process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.record import BackendPart, ErrorPart, Record
from harness.tell.report import write_report
from tests.records import LOSSES, make_record, make_steps, make_weights, written

if TYPE_CHECKING:
    from .browser import Browser


SIZES = (2, 4)


def records() -> list[Record]:
    """The reference, and on each number of ranks one cell of each parity."""
    return [make_record(), *(record for size in SIZES for record in _of(size))]


def _of(size: int) -> list[Record]:
    failed = make_record(
        label="fsdp", world_size=size, status="failed", steps=[], ranks=[], comm=[], windows=None,
        initial_weights=None, final_weights=None, run_id=f"fsdp-{size}",
        backend=BackendPart(label="fsdp", name="fsdp"),
        error=ErrorPart(kind="RuntimeError", message="no device", rank=1),
    )  # fmt: skip
    diverged = make_record(
        label="zero1", world_size=size, run_id=f"zero1-{size}", final_weights=make_weights("e" * 64),
        steps=make_steps(norms=(4.0, 3.0, 2.5, 2.0), seconds=0.9),
    )  # fmt: skip
    tight = [
        make_record(
            label=label, world_size=size, run_id=f"{label}-{size}", final_weights=make_weights("c" * 64),
            steps=make_steps([loss + 1e-6 for loss in LOSSES], seconds=seconds / size),
        )
        for label, seconds in (("zero3", 2.4), ("fsdp1", 1.2), ("zero2", 0.8))
    ]  # fmt: skip
    exact = make_record(
        label="ddp", world_size=size, run_id=f"ddp-{size}", steps=make_steps(seconds=1 / size)
    )
    return [failed, diverged, *tight, exact]


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
    runs = written(folder / "runs", *records())
    return write_report(runs, folder / "report.html")


@pytest.fixture
def browser(window: "Browser", page: Path) -> "Browser":
    """The browser with the report open."""
    window.open(page)
    return window
