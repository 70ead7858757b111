"""The broken adapters are installed while these tests run; the counts of the suite are printed at its end."""

import pytest

from .matrix import ABOUT_TIME
from .matrix import matrix as matrix

TALLY: dict[str, list[int]] = {"planted": [0, 0], "clean": [0, 0]}


@pytest.fixture(scope="session")
def tally() -> dict[str, list[int]]:
    return TALLY


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found, planted = TALLY["planted"]
    false, cells = TALLY["clean"]
    if planted or cells:
        terminalreporter.write_line(f"planted: {found} of {planted} found and named")
        terminalreporter.write_line(
            f"clean matrix: {false} findings on {cells} cells; findings that need steady steps do not "
            f"count, since two timed steps on a shared machine say nothing of it: "
            + ", ".join(sorted(ABOUT_TIME))
        )
