"""Prints what each backend reached in each case of the contract."""

from __future__ import annotations

import pytest

_REACHED: list[tuple] = []


@pytest.fixture(scope="session")
def contract_table() -> list[tuple]:
    return _REACHED


def pytest_terminal_summary(terminalreporter) -> None:
    if not _REACHED:
        return
    from tabulate import tabulate

    headers = ("backend", "ranks", "case", "loss", "norm (relative)", "weight")
    terminalreporter.section("engine contract: largest differences to one process")
    terminalreporter.write_line(tabulate(_REACHED, headers=headers, floatfmt=".1e"))
