from typing import Any

import pytest

from harness.job.experiment import MeasureSection
from harness.judge.changes import pairs
from harness.judge.comparison import Comparison, strong_scaling
from harness.judge.rows import rankings
from harness.record import EvaluationPart, Record
from harness.tell.document import Table
from harness.tell.sections.results import scaling_section
from tests.records import ENVIRONMENT, LOSSES, make_record, make_steps


def run(label: str = "ddp", ranks: int = 4, seconds: float = 1.0, **world: Any) -> Record:
    environment = ENVIRONMENT | world.pop("environment", {})
    measure = MeasureSection(**world.pop("measure", {})).model_dump(mode="json")
    steps = make_steps(seconds=seconds)
    record = make_record(label=label, world_size=ranks, environment=environment, steps=steps, measure=measure)
    return record.model_copy(update={"world": record.world.model_copy(update=world)})


TWO_NODES = {"nodes": 2, "ranks_per_node": 2}
NEWER = {"environment": {"packages": {"torch": "2.12.0", "deepspeed": "0.19.8"}}}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (TWO_NODES, ["1 node x 4", "2 nodes x 2"]),
        ({"preset": "library-defaults"}, ["like-for-like", "library-defaults"]),
        (NEWER, ["torch 2.11.0", "torch 2.12.0"]),
        ({"device": "cuda"}, ["cpu over gloo", "cuda over gloo"]),
        ({"micro_batch_size": 1, "accumulation_steps": 2}, ["micro-batch 2", "micro-batch 1"]),
        ({"environment": {"code": "b" * 12}}, ["code 0123456789ab", "code bbbbbbbbbbbb"]),
        ({"environment": {"cpu": "Other CPU"}}, ["Test CPU", "Other CPU"]),
        ({"measure": {"warmup_steps": 5}}, ["measure.warmup_steps=3", "measure.warmup_steps=5"]),
        ({"measure": {"checkpoint": True}}, ["measure.checkpoint=none", "measure.checkpoint=native"]),
    ],
)
def test_runs_in_other_circumstances_are_no_repeats(other: dict[str, Any], words: list[str]) -> None:
    groups = Comparison([run(), run(**other), run()]).groups
    assert [len(group.rows) for group in groups] == [2, 1]
    assert [group.label for group in groups] == [f"ddp ({word})" for word in words]
    assert [group.record.backend.label for group in groups] == ["ddp", "ddp"]
    assert len(rankings(groups)) == 2


def test_repeats_are_told_by_the_backend_alone() -> None:
    groups = Comparison([run(), run(), run(ranks=2), run(ranks=8, **TWO_NODES)]).groups
    assert [group.label for group in groups] == ["ddp"] * 3


def test_a_preset_that_the_label_names_is_compared_with_the_others() -> None:
    own = run("zero3:preset=library-defaults", seconds=0.5)
    groups = Comparison([run("ddp"), run("zero3"), own]).groups
    assert [group.label for group in groups] == ["ddp", "zero3", "zero3:preset=library-defaults"]
    assert [order.names[0] for order in rankings(groups).values()] == ["zero3:preset=library-defaults"]
    assert len({group.place for group in groups}) == 1


def test_fastest_of_two_nodes_is_not_sought_among_those_of_one() -> None:
    groups = Comparison([run("ddp", seconds=0.5), run("fsdp"), run("fsdp", **TWO_NODES)]).groups
    first = [order.names[0] for order in rankings(groups).values()]
    assert first == ["ddp (1 node x 4)", "fsdp (2 nodes x 2)"]


def test_both_sides_of_a_baseline_keep_their_layouts_apart() -> None:
    both = Comparison([run(), run(**TWO_NODES)])
    newer = Comparison([run(**NEWER), run(**NEWER, **TWO_NODES)])
    found = pairs(both, newer)
    assert [pair.backend for pair in found] == ["ddp (1 node x 4)", "ddp (2 nodes x 2)"]
    assert all(pair.before is not None and pair.after is not None for pair in found)
    (pair, alone) = pairs(both, Comparison.of_rows(newer.rows[1:]))
    assert (pair.after, alone.backend) == (None, "ddp (2 nodes x 2)")


def test_scaling_does_not_join_two_versions() -> None:
    assert strong_scaling(Comparison([run(ranks=2), run(**NEWER)])) == []


def test_scaling_table_tells_the_runs_and_their_range() -> None:
    section = scaling_section(Comparison([run(ranks=2), run(seconds=0.5), run(seconds=0.7)]))
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    found = [line[4:7] for line in table.values()]
    assert found == [[1, 1.0, 1.0], [2, 0.5, 0.7]]


@pytest.mark.parametrize("evaluated", [False, True])
def test_scaling_table_tells_of_an_evaluation_where_there_was_one(evaluated: bool) -> None:
    part = EvaluationPart(step=4, loss=4.5, target_tokens=254, samples=6, seconds=0.5)
    records = [run(ranks=2), run().model_copy(update={"eval": [part] if evaluated else []})]
    section = scaling_section(Comparison(records))
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    figures = [dict(zip((c.key for c in table.columns), line, strict=True)) for line in table.values()]
    found = [(line.get("evaluation_loss"), line.get("evaluation_samples_per_second")) for line in figures]
    assert found == [(None, None), (4.5, 12.0) if evaluated else (None, None)]
    assert ("evaluation_samples_per_second" in figures[0]) is evaluated


def test_a_record_that_does_not_say_how_it_was_measured_is_a_repeat_of_one_that_does() -> None:
    (group,) = Comparison([run(), run().model_copy(update={"measure": None})]).groups
    assert group.label == "ddp"


def test_the_spread_of_repeats_is_that_of_runs_in_equal_circumstances() -> None:
    def shifted(record: Record, loss: float) -> Record:
        return record.model_copy(update={"steps": make_steps([value + loss for value in LOSSES])})

    longer = {"measure": {"warmup_steps": 5}}
    comparison = Comparison(
        [run(), shifted(run(), 0.25), shifted(run(**longer), 1.0), shifted(run(**longer), 1.5)]
    )
    assert comparison.repeat_spreads == {
        "ddp (measure.warmup_steps=3) on 4": 0.25,
        "ddp (measure.warmup_steps=5) on 4": 0.5,
    }


def test_the_spread_of_repeats_tells_jobs_apart() -> None:
    jobs = [run().model_copy(update={"job_id": job_id * 12}) for job_id in "aabb"]
    assert list(Comparison(jobs).repeat_spreads) == [f"ddp on 4, job {job_id * 12}" for job_id in "ab"]
