"""One comparison of third parties' backends that misbehave in real ranks: every cell ends in a record."""

from pathlib import Path

import pytest

from harness.record import ErrorPart, Record
from tests.plugins import register

from .command_line import SMALL, harness, harness_process, records

pytestmark = [pytest.mark.long(seconds=45), pytest.mark.exhaustive]

BACKENDS = '''
"""Backends of the tests, each with a fault."""
import os
import sys
import time
from pathlib import Path

from harness.backends.ddp import DdpBackend


class Bad(DdpBackend):
    rank = 1

    def prepare(self, build_model, build_optimizer, context):
        engine = super().prepare(build_model, build_optimizer, context)
        self.taken = 0
        step = engine.step

        def stepping(lr):
            self.taken += 1
            if self.taken == 3 and context.world.rank == self.rank:
                return self.spoil(step(lr))
            return step(lr)

        engine.step = stepping
        self.change(engine)
        return engine

    def change(self, engine):
        pass

    def spoil(self, norm):
        return norm


class Listed(Bad):
    def change(self, engine):
        engine.native_config = lambda: [1, 2]


class Surrogate(Bad):
    def change(self, engine):
        engine.native_config = lambda: {"name": "\\udc80"}


class Texty(Bad):
    def spoil(self, norm):
        return "large"


class Huge(Bad):
    def spoil(self, norm):
        return 10**400


class Sleeping(Bad):
    def spoil(self, norm):
        time.sleep(600)


class Closing(Bad):
    def change(self, engine):
        closed = Path(os.environ["CLOSED"])
        engine.close = lambda: closed.touch()
'''
NAMES = ("listed", "surrogate", "texty", "huge", "sleeping", "closing")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Record]]:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad_backends.py").write_text(BACKENDS)
    register(folder, {name: f"bad_backends:{name.capitalize()}" for name in NAMES}, name="bad-backends")
    settings = ["training.steps=6", "measure.traced_steps=0", "measure.probed_steps=0"]
    settings += ["compare.noise_runs=false", "runtime.stuck_after_seconds=2", "runtime.threads_per_rank=1"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = harness_process(
        "compare", "--backends", ",".join(NAMES), "--nproc", "2", *SMALL, *arguments, cwd=folder,
        PYTHONPATH=str(folder), CLOSED=str(folder / "closed"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return folder, {record.backend.name: record for record in records(folder / "runs")}


def failure(compared: tuple[Path, dict[str, Record]], name: str) -> tuple[str, ErrorPart]:
    record = compared[1][name]
    assert record.error is not None, name
    return record.status, record.error


def test_every_cell_has_a_record(compared: tuple[Path, dict[str, Record]]) -> None:
    assert set(compared[1]) == {"single", *NAMES}
    assert compared[1]["single"].status == "ok"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("listed", "'native_config' was given [1, 2]"), ("surrogate", "has no JSON form"),
        ("texty", "'gradient_norm' was given 'large'"), ("huge", "'gradient_norm'"),
    ],
)  # fmt: skip
def test_what_breaks_the_contract_is_a_failed_record(
    compared: tuple[Path, dict[str, Record]], name: str, said: str
) -> None:
    status, error = failure(compared, name)
    assert status == "failed"
    assert error.kind == "HarnessError"
    assert said in error.message


def test_rank_that_sleeps_is_named_with_what_the_others_wait_for(
    compared: tuple[Path, dict[str, Record]],
) -> None:
    status, error = failure(compared, "sleeping")
    assert (status, error.kind, error.rank, error.step, error.phase) == ("timeout", "Stuck", 1, 2, "step")
    assert error.ranks[0].collective.startswith("gloo ")
    assert error.ranks[1].collective is None
    assert "in spoil" in error.ranks[1].stack
    folder = compared[0] / "runs" / compared[1]["sleeping"].run_id
    said = harness("hang", folder, cwd=folder).stdout
    assert said.startswith("rank 1 is in no collective, after gloo ")
    assert "; rank 0 waits in gloo " in said.splitlines()[0]


def test_engines_are_closed(compared: tuple[Path, dict[str, Record]]) -> None:
    assert compared[1]["closing"].status == "ok"
    assert (compared[0] / "closed").exists()
