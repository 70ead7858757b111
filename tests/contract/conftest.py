"""Prints what each backend reached in each case of the contract."""

import pytest

from harness.backends import registry
from tests.contract.deeds import Trace
from tests.contract.ranks import traces

_REACHED: list[tuple] = []


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """What one process trains in each of `deeds.TRAINED`."""
    return traces(registry.REFERENCE, 1, tmp_path_factory.mktemp("reference"))


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
