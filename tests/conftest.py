"""Options of the test suite."""

import os
from pathlib import Path

import hypothesis
import pytest

from tests.made_once import MadeOnce

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

# Before any library reads them: no network, and the CPU whatever this machine has, but for the CUDA stub.
os.environ["HF_HUB_OFFLINE"] = "1"
# How long a command takes says how busy the machine is, too.
os.environ["HARNESS_WORKING_AFTER"] = "0"
if "CUDA_STUB" not in os.environ:
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew instead of comparing"
    )
    parser.addoption("--cluster", action="store_true", help="run the tests on a Slurm cluster of their own")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """What one worker makes for all of the session, below its own temporary folder."""
    folder = tmp_path_factory.getbasetemp()
    return MadeOnce((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "made-once")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort modules by falling processor time, so that workers side by side end together."""
    seconds: dict[Path, float] = {}
    for item in items:
        for mark in item.iter_markers("long"):
            seconds[item.path] = mark.kwargs["seconds"]
    items.sort(key=lambda item: -seconds.get(item.path, 0))
