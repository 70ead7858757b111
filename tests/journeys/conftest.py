"""The folder of a journey, and an observed script that two journeys begin with."""

import sys
from pathlib import Path

import pytest

from tests.harness.rank.observing.test_scripts import make_job
from tests.journeys.journey import Journey
from tests.made_once import MadeOnce

PLAIN = Path(__file__).parent / "scripts" / "plain.py"
WINDOWS = ("--set", "measure.cooldown_steps=1", "--")
VARIABLES = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def journey(tmp_path: Path) -> Journey:
    """A journey that begins in an empty folder."""
    return Journey(tmp_path)


@pytest.fixture(scope="module")
def shared_journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    """A journey whose folder the tests of a module share, in the order in which they are written."""
    return Journey(tmp_path_factory.mktemp("journey"))


@pytest.fixture(scope="session")
def bare_model_observed(made_once: MadeOnce) -> Path:
    """The runs of `harness observe` around a script that trains a bare model; copy them."""
    with made_once.place("bare-model-observed") as folder:
        if not folder.exists():
            journey = Journey(folder.with_suffix(".new"))
            journey.folder.mkdir()
            make_job(journey.folder)
            words = (*WINDOWS, sys.executable, PLAIN, "--bare")
            journey.harness("observe", "--runs", "observed", *words, **VARIABLES)
            journey.folder.rename(folder)
        return folder / "observed"
