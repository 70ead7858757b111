"""What the self-check tries on which machine."""

import json

from harness.backends.libraries.facts import traps_of
from harness.doctor.self_check import BETWEEN_RANKS, ON_ONE_RANK, SelfCheck, conclude, cover, document
from harness.record import ErrorPart, Record
from tests.built_in import MULTIPLYING
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights

PLANTED = list(BETWEEN_RANKS)


def summed(name: str) -> Record:
    steps = make_steps(LOSSES, [norm * 2 for norm in NORMS])
    return make_record(label=name, steps=steps, final_weights=make_weights("c" * 64))


def concluded(*records: Record, **changes) -> SelfCheck:
    """The self-check of these runs and a reference, without planted faults."""
    return conclude([make_record(), *records], changes.get("faults", {}), changes.get("not_covered", {}))


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


ALL = ("torch", "deepspeed", "accelerate", "transformers")


def test_one_of_each_family_comes_first() -> None:
    coverage = cover([], 2, ALL)
    assert coverage.first == ("ddp", "zero3", "fsdp")
    assert {"zero1", "fsdp1", "accelerate-ddp"} <= set(coverage.rest)
    assert coverage.faults == BETWEEN_RANKS
    assert set(coverage.left_out) == set(MULTIPLYING)


def test_one_rank_has_defects_of_its_own_and_says_what_it_cannot_show() -> None:
    coverage = cover([], 1, ALL)
    assert coverage.faults == ON_ONE_RANK
    left_out = {"fsdp1", "fsdp1-grad-op", "reduction and sharding over ranks", *MULTIPLYING}
    assert set(coverage.left_out) == left_out
    assert "NO_SHARD" in coverage.left_out["fsdp1"]


def test_backends_of_a_missing_library_are_left_out_with_the_way_to_get_it() -> None:
    coverage = cover([], 2, ("torch", "accelerate"))
    assert coverage.left_out["zero3"] == "deepspeed is not installed (pip install deepspeed)"
    assert coverage.first == ("ddp", "fsdp")
    assert "accelerate-zero3" in coverage.left_out


def test_backends_that_were_named_are_tried_whatever_the_time() -> None:
    coverage = cover(["fsdp1", "zero2"], 2, ALL)
    assert (coverage.first, coverage.rest) == (("fsdp1", "zero2"), ())
