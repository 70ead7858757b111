"""Options of the test suite."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import kept
from tests.made_once import MadeOnce
from tests.tracing import trace_here

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

MOVED_CACHES = (
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "MPLCONFIGDIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME",
    "TRITON_CACHE_DIR", "TRITON_HOME",
)  # fmt: skip
"""Where a user may have told libraries to keep what otherwise lies below XDG_CACHE_HOME."""


def use_own_caches() -> None:
    """Let no test read or write a user's caches: the tests have their own, also a later session's."""
    folder = kept.caches()
    for name in MOVED_CACHES:
        os.environ.pop(name, None)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torchinductor")


if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have their parent's variables
    use_own_caches()


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


@pytest.fixture(scope="session", autouse=True)
def _profiles_are_traced_here() -> Iterator[None]:
    """But for the CUDA stub, which a tracer's process must not see."""
    with pytest.MonkeyPatch.context() as patch:
        if "CUDA_STUB" not in os.environ:
            trace_here(patch)
        yield


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What ranks left that a failing test may have read is made again in the next session."""
    report = yield
    if report.failed:
        kept.runs().forget()
    return report


@pytest.hookimpl(trylast=True)  # what is not selected takes no time
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort modules by falling processor time, so that workers side by side end together."""
    seconds: dict[Path, float] = {}
    for item in items:
        for mark in item.iter_markers("long"):
            seconds[item.path] = mark.kwargs["seconds"]
    items.sort(key=lambda item: -seconds.get(item.path, 0))
