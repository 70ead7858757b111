"""Ranks that share samples are one data rank: what is compared of them, and what is found of them."""

from typing import Any

from harness.judge.agreement.causes import name_scale, sums_of_step
from harness.judge.agreement.job_equivalence import job_differences
from harness.record import DimensionPart, Record
from tests.records import make_ranks, make_record


def laid_out(*sizes: tuple[Any, int], **fields: list[Any]) -> Record:
    """A record on 4 ranks; `fields`: of each rank."""
    record = make_record(label="tp", world_size=4)
    world = record.world.model_copy(
        update={"dimensions": [DimensionPart(name=name, size=size) for name, size in sizes]}
    )
    ranks = [
        rank.model_copy(update={name: values[rank.rank] for name, values in fields.items()})
        for rank in make_ranks(4)
    ]
    return record.model_copy(update={"world": world, "ranks": ranks})


def reference() -> Record:
    (rank,) = make_ranks(1)
    rank = rank.model_copy(update={"batch_digests": [["a", "b"]], "batch_hash_sums": ["3"]})
    return make_record().model_copy(update={"ranks": [rank]})


def test_peers_with_the_same_samples_are_the_reference_s_job() -> None:
    record = laid_out(
        ("data", 2), ("tensor", 2),
        batch_digests=[[["a"]], [["a"]], [["b"]], [["b"]]], batch_hash_sums=[["1"], ["1"], ["2"], ["2"]],
    )  # fmt: skip
    assert job_differences(reference(), record) == []


def test_peers_with_different_samples_are_found() -> None:
    record = laid_out(
        ("data", 2), ("tensor", 2),
        batch_digests=[[["a"]], [["b"]], [["c"]], [["d"]]], batch_hash_sums=[["1"], ["2"], ["3"], ["4"]],
    )  # fmt: skip
    (difference,) = job_differences(reference(), record)
    assert difference.kind == "peers-fed-differently"
    assert difference.reference == "the same on ranks 0, 1"


def test_stages_that_see_no_batch_are_passed_over() -> None:
    record = laid_out(
        ("pipeline", 2), ("data", 2),
        batch_digests=[[[]], [[]], [["a"]], [["b"]]], batch_hash_sums=[[None], [None], ["1"], ["2"]],
    )  # fmt: skip
    assert job_differences(reference(), record) == []


def test_losses_of_tensor_ranks_count_once_and_parts_add_up() -> None:
    losses = [[1.0], [1.0], [2.0], [2.0]]
    assert sums_of_step(laid_out(("data", 2), ("tensor", 2), loss_sums=losses), 0, "loss_sums") == [1.0, 2.0]
    parts = [[1.0], [2.0], [4.0], [8.0]]
    assert sums_of_step(laid_out(("data", 2), ("sequence", 2), loss_sums=parts), 0, "loss_sums") == [
        3.0,
        12.0,
    ]


def test_a_factor_of_the_ranks_that_share_samples_is_named() -> None:
    mesh = laid_out(("data", 1), ("sequence", 4)).world.mesh
    assert name_scale(4.0, mesh, 1) == ["added up 4 times over the 4 ranks along 'sequence'"]
