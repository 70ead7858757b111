"""What is planted where, and that a record which blames the wrong rank or place is no truthful one."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from harness.record import ErrorPart
from tests.faults.injection import (
    BACKENDS,
    IN_STEP,
    KINDS,
    STEPS,
    Injection,
    kind_of,
    plan,
    read_plan,
    together,
    write_plan,
)
from tests.faults.judge import EXPECTED, untruths
from tests.faults.namespaces import why_not
from tests.faults.plants import ACTIONS
from tests.faults.results import failures, judged, section, table_of_all
from tests.faults.scene import Ended, Seen
from tests.records import make_record

SOUND = Ended(code=0, errors="", left=[])
ERROR = ErrorPart(
    kind="Exit", message="the rank was killed by SIGKILL", rank=1, exit_code=-9, step=2, phase="backward"
)
KILLED = Injection(
    name="killed-ddp-0", kind="killed", backend="ddp", repeat=0, rank=1, phase="backward", step=2
)


def seen(error: ErrorPart | None = ERROR, **changes: object) -> Seen:
    record = make_record(status="failed", error=error)
    happened = {"run_id": "run", "phase": "backward", "step": 2, "at": 0.0}
    return replace(
        Seen(
            injection=KILLED, happened=happened, record=record, record_seconds=0.1, calls=[SOUND],
            others_complete=True, left=[],
        ),
        **changes,  # type: ignore[arg-type]
    )  # fmt: skip


def test_every_kind_is_planted_twice_in_every_backend_and_judged() -> None:
    assert set(ACTIONS) == set(EXPECTED) == {kind.name for kind in KINDS}
    injections = plan(KINDS, 2, 20)
    assert Counter((i.kind, i.backend) for i in injections) == {
        (kind.name, backend): 2 for kind in KINDS for backend in BACKENDS
    }
    assert len(injections) == 120
    assert len({i.name for i in injections}) == 120
    for injection in injections:
        assert injection.phase in kind_of(injection).phases
        assert (injection.step is None) == (injection.phase not in IN_STEP)
        assert injection.step is None or 0 <= injection.step < STEPS


def test_the_seed_decides_where(tmp_path: Path) -> None:
    assert plan(KINDS, 2, 20) == plan(KINDS, 2, 20) != plan(KINDS, 2, 21)
    write_plan(tmp_path / "plan.json", plan(KINDS, 1, 20))
    assert read_plan(tmp_path / "plan.json") == plan(KINDS, 1, 20)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 0}, "rank 0"),
        ({"step": 3}, "step 3, phase backward"),
        ({"phase": "forward"}, "step 2, phase forward"),
        ({"exit_code": 1}, "exit code 1"),
        ({"kind": "RuntimeError"}, "kind RuntimeError"),
        ({"message": "Connection reset by peer"}, "message 'Connection reset by peer'"),
    ],
)
def test_what_differs_from_the_fault_is_named(changes: dict[str, object], said: str) -> None:
    assert untruths(seen(ERROR.model_copy(update=changes))) == [said]


def test_what_is_missing_is_no_success() -> None:
    assert untruths(seen()) == []
    assert untruths(seen(happened=None)) == ["the fault did not happen"]
    assert untruths(seen(record=None)) == ["no record"]
    assert untruths(seen(calls=[Ended(code=None, errors="", left=[])])) == ["the command hung"]
    assert untruths(seen(None)) == ["status failed without an error"]
    left = judged(seen(left=["process (python)"], others_complete=False))
    assert failures([left]) == ["killed-ddp-0: left process (python); other cells are not complete"]


def test_the_page_counts_what_is_truthful() -> None:
    sound = judged(seen())
    wrong = replace(judged(seen(ERROR.model_copy(update={"rank": 0}))), name="killed-ddp-1")
    text = section([sound, wrong], 20, "torch 2.13")
    assert "2 faults were injected into real ranks: 1 kinds" in text
    assert "1 records are truthful, 0 commands hung" in text
    assert "no: rank 0" in table_of_all([sound, wrong])


@pytest.mark.long(seconds=40)
@pytest.mark.exhaustive
@pytest.mark.skipif(why_not() is not None, reason=f"needs namespaces of its own: {why_not()}")
def test_three_faults_leave_truthful_records_and_nothing_else() -> None:
    with TemporaryDirectory(prefix="faults-") as folder:  # pytest's path is too long for sockets
        kinds, named = ("exit-0", "sleep", "extra-collective"), {kind.name: kind for kind in KINDS}
        assert together([named[kind] for kind in kinds], 0)[1].phase in IN_STEP  # elsewhere it takes a minute
        chosen = ["--together", "--kinds", ",".join(kinds), "--seed", "0"]
        command = [sys.executable, "-m", "tests.faults", str(Path(folder, "few")), *chosen]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 injections, 0 did not end as they should" in done.stderr
