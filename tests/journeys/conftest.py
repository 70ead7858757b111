"""The folder of a journey."""

from pathlib import Path

import pytest

from tests.journeys.journey import Journey


@pytest.fixture
def journey(tmp_path: Path) -> Journey:
    """A journey that begins in an empty folder."""
    return Journey(tmp_path)


@pytest.fixture(scope="module")
def shared_journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    """A journey whose folder the tests of a module share, in the order in which they are written."""
    return Journey(tmp_path_factory.mktemp("journey"))
