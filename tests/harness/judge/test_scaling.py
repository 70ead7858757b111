from dataclasses import replace
from typing import Any

import pytest

from harness.job.job import OptimizerSection
from harness.judge.comparison import Comparison, strong_scaling, weak_scaling
from harness.record import Record, WeightsPart
from tests.records import make_record, make_steps


def run(label: str, ranks: int, seconds: float, **changes: object) -> Record:
    return make_record(
        label=label, world_size=ranks, run_id=f"{label}-{ranks}", steps=make_steps(seconds=seconds), **changes
    )


def growing(ranks: int, seconds: float, parameters: int = 1000, tokens: int | None = None) -> Record:
    """A job whose batch grows with the ranks, as weak scaling wants it."""
    per_step = {step: {"tokens": tokens or 512 * ranks} for step in range(4)}
    return make_record(
        label="fsdp",
        world_size=ranks,
        run_id=f"fsdp-{ranks}",
        job_id=f"{ranks:012d}",
        training={"global_batch_size": 4 * ranks},
        steps=make_steps(seconds=seconds, changes=per_step),
        initial_weights=WeightsPart(digest="a" * 64, l2_norm=1.0, parameter_count=parameters),
    )


def rows(*records: Record) -> Comparison:
    return Comparison(records)


def test_published_times_give_the_published_speed_up() -> None:
    """CINECA deck, Llama 3.1 on Leonardo: 3670 s on one GPU, 1821 s on two."""
    (curve,) = strong_scaling(rows(run("fsdp", 1, 3670 / 4), run("fsdp", 2, 1821 / 4)))
    first, second = curve
    assert first.training_seconds == pytest.approx(3670)
    assert second.training_seconds == pytest.approx(1821)
    assert second.speed_up == pytest.approx(2.015, abs=5e-4)
    assert second.strong_efficiency == pytest.approx(1.0077, abs=5e-4)


def test_reference_is_the_base_of_a_backend_without_a_run_on_one_rank() -> None:
    (curve,) = strong_scaling(rows(run("single", 1, 1.0), run("ddp", 2, 0.6), run("ddp", 4, 0.4)))
    assert [point.base.label for point in curve] == ["single"] * 3
    assert [point.speed_up for point in curve] == pytest.approx([1.0, 1 / 0.6, 2.5])
    assert curve[-1].strong_efficiency == pytest.approx(2.5 / 4)


def test_own_run_on_one_rank_goes_before_the_reference() -> None:
    (curve,) = strong_scaling(rows(run("single", 1, 1.0), run("ddp", 1, 2.0), run("ddp", 2, 1.0)))
    assert curve[-1].base.label == "ddp"
    assert curve[-1].speed_up == pytest.approx(2.0)


def test_without_a_smaller_run_there_is_no_scaling() -> None:
    assert strong_scaling(rows(run("ddp", 2, 1.0), run("fsdp", 4, 1.0))) == []


def laid_out(nodes: int, ranks_per_node: int, seconds: float, threads: int = 1, **changes: Any) -> Record:
    record = run("fsdp", nodes * ranks_per_node, seconds, **changes)
    layout = {"nodes": nodes, "ranks_per_node": ranks_per_node, "threads_per_rank": threads}
    return record.model_copy(update={"world": record.world.model_copy(update=layout)})


def names_and_speed_ups(*records: Record) -> dict[str, list[tuple[int, float]]]:
    return {
        curve[0].curve: [(point.group.world_size, round(point.speed_up, 9)) for point in curve]
        for curve in strong_scaling(rows(*records))
    }


def test_each_layout_of_one_number_of_ranks_has_a_curve_of_its_own() -> None:
    """4 ranks on one node and 2 x 2 are two measurements, not a step down of one curve."""
    whole = [laid_out(1, 1, 1.0), laid_out(1, 2, 0.5), laid_out(1, 4, 0.25)]
    assert names_and_speed_ups(*whole, laid_out(2, 2, 0.5), laid_out(2, 4, 0.2)) == {
        "fsdp (1 node)": [(1, 1.0), (2, 2.0), (4, 4.0)],
        "fsdp (2 nodes)": [(1, 1.0), (4, 2.0), (8, 5.0)],
    }


def test_layouts_of_the_fewest_ranks_are_measured_by_the_one_on_fewest_nodes() -> None:
    fewest = [laid_out(2, 1, 1.25), laid_out(1, 2, 1.0)]
    assert names_and_speed_ups(*fewest, laid_out(2, 2, 0.5), laid_out(1, 4, 0.5)) == {
        "fsdp (1 node)": [(2, 1.0), (4, 2.0)],
        "fsdp (2 nodes)": [(2, 0.8), (4, 2.0)],
    }


def test_nodes_that_grow_with_the_ranks_make_one_curve() -> None:
    assert list(names_and_speed_ups(laid_out(1, 4, 1.0), laid_out(2, 4, 0.5), laid_out(4, 4, 0.25))) == [
        "fsdp"
    ]


def test_a_rank_of_more_threads_is_no_base_on_a_cpu() -> None:
    """Two ranks of one thread have no more processors than one rank of two."""
    assert names_and_speed_ups(laid_out(1, 1, 1.0, 2), laid_out(1, 2, 1.0), laid_out(1, 4, 0.5)) == {
        "fsdp (1 thread)": [(2, 1.0), (4, 2.0)]
    }


def test_threads_of_the_host_do_not_matter_on_gpus() -> None:
    on_gpus = [
        record.model_copy(update={"world": record.world.model_copy(update={"device": "cuda"})})
        for record in (laid_out(1, 1, 1.0, 2), laid_out(1, 2, 0.5))
    ]
    assert names_and_speed_ups(*on_gpus) == {"fsdp": [(1, 1.0), (2, 2.0)]}


def test_speed_up_is_that_of_the_throughput() -> None:
    """One slow step of a run counts in both alike."""
    uneven = run("ddp", 1, 1.0)
    steps = [replace(step, seconds=4.0) if step is uneven.steps[-1] else step for step in uneven.steps]
    (curve,) = strong_scaling(rows(uneven.model_copy(update={"steps": steps}), run("ddp", 2, 1.0)))
    rates = [point.group.median("tokens_per_second") or 0.0 for point in curve]
    assert curve[-1].speed_up == pytest.approx(rates[1] / rates[0])
    assert curve[-1].speed_up > 1.5


def test_speed_up_is_that_of_the_same_round() -> None:
    """The machine slows down round by round; each round by itself says 1.6."""
    slowing = [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0]
    records = [
        run("ddp", ranks, 0.8 * slow / (1 if ranks == 1 else 1.6)).model_copy(
            update={"repeat": number, "run_id": f"{ranks}-{number}"}
        )
        for number, slow in enumerate(slowing)
        for ranks in (1, 2)
    ]
    (curve,) = strong_scaling(rows(*records))
    ratio = curve[-1].ratio
    assert (curve[0].speed_up, curve[-1].speed_up) == (1.0, pytest.approx(1.6))
    assert ratio.extent is not None
    assert (ratio.extent.low, ratio.extent.high) == (pytest.approx(1.6), pytest.approx(1.6))
    assert (ratio.rounds, ratio.order) == (7, "faster")


def test_a_run_that_left_the_reference_is_no_point() -> None:
    alone, wrong = run("single", 1, 1.0), run("ddp", 4, 0.1)
    wrong = wrong.model_copy(update={"steps": make_steps(norms=(4.0, 3.0, 2.5, 2.0), seconds=0.1)})
    judged = rows(alone, run("ddp", 2, 1.0), wrong)
    assert [row.judgement.parity for row in judged.rows] == ["exact", "exact", "diverged"]
    (curve,) = strong_scaling(judged)
    assert [point.group.world_size for point in curve] == [1, 2]


def test_curves_of_other_circumstances_are_named_by_them() -> None:
    other = {"preset": "library-defaults"}
    mixed = [run("ddp", 1, 1.0), run("ddp", 2, 0.5)]
    mixed += [r.model_copy(update={"world": r.world.model_copy(update=other)}) for r in mixed]
    assert list(names_and_speed_ups(*mixed)) == ["ddp (like-for-like)", "ddp (library-defaults)"]


def test_failed_runs_are_no_points() -> None:
    failed = run("ddp", 4, 0.1, status="failed")
    assert strong_scaling(rows(run("ddp", 2, 1.0), failed)) == []


def test_twice_the_time_for_twice_the_ranks_is_half_the_weak_efficiency() -> None:
    (curve,) = weak_scaling(rows(growing(2, 1.0), growing(4, 2.0)))
    assert [point.weak_efficiency for point in curve] == [1.0, 0.5]
    assert [point.work_ratio for point in curve] == [1.0, 1.0]


def test_work_that_does_not_double_with_the_ranks_is_seen() -> None:
    """KAUST's weak scaling: the vocabulary dominates, so twice the layers are not twice the model."""
    (curve,) = weak_scaling(rows(growing(2, 1.0, tokens=1024), growing(4, 1.1, 1200, tokens=1024)))
    assert curve[-1].work_ratio == pytest.approx(0.6)


def test_layouts_of_weak_scaling_have_curves_of_their_own() -> None:
    two, one_node = growing(2, 1.0), growing(4, 1.0)
    layout = {"nodes": 2, "ranks_per_node": 2}
    two_nodes = one_node.model_copy(update={"world": one_node.world.model_copy(update=layout)})
    found = weak_scaling(rows(two, one_node, two_nodes))
    assert [[point.group.record.world.nodes for point in curve] for curve in found] == [[1, 1], [1, 2]]
    assert [curve[-1].curve for curve in found] == ["fsdp (1 node)", "fsdp (2 nodes)"]


def test_one_job_on_several_ranks_is_no_weak_scaling() -> None:
    assert weak_scaling(rows(run("ddp", 2, 1.0), run("ddp", 4, 1.0))) == []


def test_jobs_that_differ_in_more_than_size_are_no_weak_scaling() -> None:
    other = growing(4, 1.0)
    optimizer = OptimizerSection(learning_rate=1.0)
    changed = other.model_copy(update={"job": other.job.model_copy(update={"optimizer": optimizer})})
    assert weak_scaling(rows(growing(2, 1.0), changed)) == []


def test_micro_batches_of_one_number_of_ranks_have_curves_of_their_own() -> None:
    cut = laid_out(1, 2, 0.7)
    cut = cut.model_copy(update={"world": cut.world.model_copy(update={"micro_batch_size": 1})})
    assert names_and_speed_ups(laid_out(1, 1, 1.0), laid_out(1, 2, 0.5), cut) == {
        "fsdp (micro-batch 4)": [(1, 1.0), (2, 2.0)],
        "fsdp (micro-batch 1)": [(1, 1.0), (2, round(1 / 0.7, 9))],
    }
