"""What the self-check tries on which machine."""

from harness.doctor.self_check import BETWEEN_RANKS, ON_ONE_RANK, cover
from tests.built_in import MULTIPLYING

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
