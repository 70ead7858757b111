"""Options of the test suite."""

import os

import pytest

# Before any library reads them: no network, and the CPU whatever this machine has.
os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew instead of comparing"
    )
    parser.addoption("--cluster", action="store_true", help="run the tests on a Slurm cluster of their own")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with a long test go first: where several run at once, none is left alone at the end."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)
