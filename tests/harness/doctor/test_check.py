import json

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.compare.rows import make_rows
from harness.doctor.check import MUST_BE_NAMED, SelfCheck, _missed, document
from harness.doctor.known import traps_of
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights


def summed(name: str):
    steps = make_steps(LOSSES, [norm * 2 for norm in NORMS])
    return make_record(label=name, steps=steps, final_weights=make_weights("c" * 64))


def test_a_planted_defect_that_is_not_named_is_missed() -> None:
    missed = _missed([make_record(), *(make_record(label=name) for name in MUST_BE_NAMED)])
    assert missed == dict.fromkeys(MUST_BE_NAMED, "nothing")


def test_a_planted_defect_that_is_named_is_not_missed() -> None:
    missed = _missed([make_record(), *(summed(name) for name in MUST_BE_NAMED)])
    assert "planted-gradients-summed" not in missed
    assert "gradient-scale" in missed["planted-stale-weights"]


@pytest.mark.parametrize(
    "changes", [{"failed": {"ddp": "Exit"}}, {"missed": {"planted-wrong-beta2": "nothing"}}]
)
def test_an_installation_with_something_off_is_not_trusted(changes: dict) -> None:
    rows = make_rows([make_record(), make_record(label="ddp")])
    sound = {"rows": rows, "false": [], "failed": {}, "missed": {}}
    assert SelfCheck(**sound).trusted
    said = document(SelfCheck(**(sound | changes)), traps_of({"deepspeed": "0.19.8"}))
    assert json.loads(json.dumps(said))["trusted"] is False
    assert any("clips" in trap["trap"] for trap in said["known_traps"])


def test_older_versions_have_no_known_traps() -> None:
    assert traps_of({"deepspeed": "0.18.2", "torch": "2.10.0+cpu"}) == []


@pytest.mark.long
def test_this_installation_can_be_trusted() -> None:
    done = CliRunner().invoke(harness, ["doctor", "--json"])
    said = json.loads(done.stdout)
    assert said["trusted"], said["self_check"]
    assert done.exit_code == 0
    assert {b["name"] for b in said["backends"] if b["status"] == "ok"} >= {"ddp", "zero3", "fsdp", "fsdp1"}
