import json
from pathlib import Path

import pytest

from harness.doctor import check, command, coverage
from harness.doctor.check import SelfCheck, conclude, document
from harness.doctor.coverage import BETWEEN_RANKS
from harness.doctor.known import traps_of
from harness.record import ErrorPart, Record
from tests.harness.commands.command_line import harness
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights

PLANTED = [defect.backend for defect in BETWEEN_RANKS]


def summed(name: str) -> Record:
    steps = make_steps(LOSSES, [norm * 2 for norm in NORMS])
    return make_record(label=name, steps=steps, final_weights=make_weights("c" * 64))


def concluded(*records: Record, **changes) -> SelfCheck:
    """The self-check of these runs and a reference, without planted defects."""
    return conclude([make_record(), *records], changes.get("defects", ()), changes.get("not_covered", {}))


def test_a_planted_defect_that_is_not_named_is_missed() -> None:
    missed = concluded(*(make_record(label=name) for name in PLANTED), defects=BETWEEN_RANKS).missed
    assert list(missed) == PLANTED
    assert missed["planted-wrong-beta2"] == "it was not named as update-differs: found nothing"


def test_a_planted_defect_that_is_named_is_not_missed() -> None:
    missed = concluded(*map(summed, PLANTED), defects=BETWEEN_RANKS).missed
    assert "planted-gradients-summed" not in missed
    assert "gradient-scale" in missed["planted-stale-weights"]


def test_a_defect_in_the_clean_matrix_is_a_false_finding() -> None:
    assert concluded(make_record(label="ddp")).trusted
    broken = concluded(summed("ddp"))
    assert not broken.trusted
    assert "gradient-scale" in [finding.id for finding in broken.false]


def test_a_backend_that_fails_is_off_and_one_that_is_unsupported_is_not() -> None:
    gone = make_record(label="fsdp", status="failed", error=ErrorPart(kind="Exit", message="gone"), steps=[])
    broken = concluded(make_record(label="ddp"), gone)
    assert (broken.trusted, broken.failed) == (False, {"fsdp": "Exit: gone"})
    refused = make_record(label="fsdp", status="unsupported", reasons=["needs a GPU"], steps=[])
    assert concluded(make_record(label="ddp"), refused).trusted


def test_where_nothing_ran_nothing_is_trusted() -> None:
    assert not concluded().trusted


def test_what_is_off_is_in_the_document() -> None:
    missed = concluded(*(make_record(label=name) for name in PLANTED), defects=BETWEEN_RANKS)
    said = json.loads(json.dumps(document(missed, traps_of({"deepspeed": "0.19.8"}))))
    assert said["trusted"] is False
    assert list(said["self_check"]["missed"]) == PLANTED
    assert any("clips" in trap["trap"] for trap in said["known_traps"])


def test_older_versions_have_no_known_traps() -> None:
    assert traps_of({"deepspeed": "0.18.2", "torch": "2.10.0+cpu"}) == []


def doctor(*options: str) -> tuple[int, str]:
    done = harness("doctor", *options, cwd=Path.cwd())
    return done.returncode, done.stdout or done.stderr


def test_without_torch_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "package_versions", lambda extra: {"transformers": "5.23"})
    code, said = doctor()
    assert code == 1
    assert said == "harness: torch not installed, so nothing can run here: pip install torch\n"


def test_an_unknown_backend_is_one_line() -> None:
    code, said = doctor("--backends", "zero4")
    assert code == 1
    assert "backend 'zero4' is unknown" in said.splitlines()[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_installation_that_can_be_trusted(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of it as one backend: three planted defects are found on one rank as on two."""
    monkeypatch.setattr(command, "RANKS", ranks)
    code, said = doctor("--backends", "fsdp")
    assert code == 0, said
    assert "3 of 3 planted defects named" in said
    assert "deepspeed: clips gradients at 1.0" in said
    assert said.splitlines()[-1].startswith("this installation can be trusted")
    assert ("reduction and sharding over ranks" in said) == (ranks == 1)


def test_a_broken_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = doctor("--backends", "planted-divided-again")
    assert code == 1
    assert "- gradient-scale: planted-divided-again on 2 ranks: all gradients x 0.5" in said
    assert said.splitlines()[-1] == "this installation cannot be trusted until these are resolved"


def test_a_missing_library_is_named_and_the_rest_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real = command.package_versions

    def without_deepspeed(extra: tuple[str, ...]) -> dict[str, str]:
        return {name: version for name, version in real(extra).items() if name != "deepspeed"}

    monkeypatch.setattr(command, "package_versions", without_deepspeed)
    code, said = doctor("--backends", "ddp,zero3")
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("zero3")]
    assert "deepspeed is not installed (pip install deepspeed)" in line
    assert (
        said.splitlines()[-1] == "this installation can be trusted, in what was tried: 1 line above was not"
    )


def test_what_two_minutes_do_not_hold_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(coverage, "FAMILIES", ("ddp",))
    code, said = doctor("--json")
    document = json.loads(said)
    assert code == 0, document["self_check"]
    ran = {backend["name"] for backend in document["backends"]}
    assert ran == {"single", "ddp"}
    assert "two minutes" in document["not_covered"]["fsdp1"]


@pytest.mark.long
def test_this_installation_can_be_trusted() -> None:
    code, text = doctor("--json")
    said = json.loads(text)
    assert said["trusted"], said["self_check"]
    assert code == 0
    assert {b["name"] for b in said["backends"] if b["status"] == "ok"} >= {"ddp", "zero3", "fsdp"}
