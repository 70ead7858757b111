import json

from harness.backends.libraries.facts import traps_of
from harness.doctor.self_check import BETWEEN_RANKS, SelfCheck, conclude, document
from harness.record import ErrorPart, Record
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights

PLANTED = [defect.backend for defect in BETWEEN_RANKS]


def summed(name: str) -> Record:
    steps = make_steps(LOSSES, [norm * 2 for norm in NORMS])
    return make_record(label=name, steps=steps, final_weights=make_weights("c" * 64))


def concluded(*records: Record, **changes) -> SelfCheck:
    """The self-check of these runs and a reference, without planted faults."""
    return conclude([make_record(), *records], changes.get("faults", ()), changes.get("not_covered", {}))


def test_a_planted_defect_that_is_not_named_is_missed() -> None:
    missed = concluded(*(make_record(label=name) for name in PLANTED), faults=BETWEEN_RANKS).missed
    assert list(missed) == PLANTED
    assert missed["planted-wrong-beta2"] == "it was not found as update-differs: found nothing"


def test_a_planted_defect_that_is_named_is_not_missed() -> None:
    missed = concluded(*map(summed, PLANTED), faults=BETWEEN_RANKS).missed
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
    missed = concluded(*(make_record(label=name) for name in PLANTED), faults=BETWEEN_RANKS)
    said = json.loads(json.dumps(document(missed, traps_of({"deepspeed": "0.19.8"}))))
    assert said["trusted"] is False
    assert list(said["self_check"]["missed"]) == PLANTED
    assert any("clips" in trap["trap"] for trap in said["known_traps"])


def test_traps_are_those_of_the_versions() -> None:
    older = [trap.id for trap in traps_of({"deepspeed": "0.18.2", "torch": "2.10.0+cpu"})]
    assert older == ["zero2-loses-micro-steps", "zero0-bf16-scales-gradients", "gradients-all-reduced"]
    between = {trap.id for trap in traps_of({"deepspeed": "0.19.2", "accelerate": "1.15.0"})}
    assert "zero-clips-by-default" not in between
    assert {"zero0-begins-at-step-two", "fsdp-plugin-ignored", "steps-in-backward"} <= between
    assert traps_of({}) == []
