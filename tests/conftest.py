"""Options of the test suite."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew instead of comparing"
    )
    parser.addoption("--cluster", action="store_true", help="run the tests on a Slurm cluster of their own")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
