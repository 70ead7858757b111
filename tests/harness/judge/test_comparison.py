"""Runs that are not the same job stand apart everywhere."""

import json
from dataclasses import replace

import pytest

from harness.job.job import OptimizerSection
from harness.judge.comparison import Comparison, DifferingSetting, strong_scaling, weak_scaling
from harness.record import ObservationPart, Record, WeightsPart
from harness.tell.before_after import before_after
from harness.tell.first_page import short_document
from harness.tell.report import details_document
from harness.tell.sections.job import settings_section
from harness.tell.terminal import terminal_table, where_to_read
from harness.tell.writers.text import render_details, render_markdown
from tests.harness.tell.cells import growing
from tests.records import changed, make_record, make_steps, make_weights, told


def run(label: str, ranks: int, seconds: float, **changes: object) -> Record:
    return make_record(
        label=label, world_size=ranks, run_id=f"{label}-{ranks}", steps=make_steps(seconds=seconds), **changes
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
    (own,) = strong_scaling(rows(run("single", 1, 1.0), run("ddp", 1, 2.0), run("ddp", 2, 1.0)))
    assert (own[-1].base.label, own[-1].speed_up) == ("ddp", pytest.approx(2.0))


def test_without_a_smaller_run_that_succeeded_there_is_no_scaling() -> None:
    failed = run("ddp", 4, 0.1, status="failed")
    for other in (run("fsdp", 4, 1.0), failed):
        assert strong_scaling(rows(run("ddp", 2, 1.0), other)) == []


def laid_out(nodes: int, ranks_per_node: int, seconds: float, threads: int = 1) -> Record:
    layout = {"nodes": nodes, "ranks_per_node": ranks_per_node, "threads_per_rank": threads}
    return run("fsdp", nodes * ranks_per_node, seconds, world=layout)


MIXED = [run("ddp", 1, 1.0), run("ddp", 2, 0.5)]


@pytest.mark.parametrize(
    ("records", "curves"),
    [
        # 4 ranks on one node and 2 x 2 are two measurements, not a step down of one curve.
        ([laid_out(1, 1, 1.0), laid_out(1, 2, 0.5), laid_out(1, 4, 0.25), laid_out(2, 2, 0.5),
          laid_out(2, 4, 0.2)],
         {"fsdp (1 node)": [(1, 1.0), (2, 2.0), (4, 4.0)], "fsdp (2 nodes)": [(1, 1.0), (4, 2.0), (8, 5.0)]}),
        # Those of the fewest ranks are measured by the one on fewest nodes.
        ([laid_out(2, 1, 1.25), laid_out(1, 2, 1.0), laid_out(2, 2, 0.5), laid_out(1, 4, 0.5)],
         {"fsdp (1 node)": [(2, 1.0), (4, 2.0)], "fsdp (2 nodes)": [(2, 0.8), (4, 2.0)]}),
        # Nodes that grow with the ranks make one curve.
        ([laid_out(1, 4, 1.0), laid_out(2, 4, 0.5), laid_out(4, 4, 0.25)],
         {"fsdp": [(4, 1.0), (8, 2.0), (16, 4.0)]}),
        # Two ranks of one thread have no more processors than one rank of two; on GPUs that does not matter.
        ([laid_out(1, 1, 1.0, 2), laid_out(1, 2, 1.0), laid_out(1, 4, 0.5)],
         {"fsdp (1 thread)": [(2, 1.0), (4, 2.0)]}),
        ([changed(one, world={"device": "cuda"}) for one in (laid_out(1, 1, 1.0, 2), laid_out(1, 2, 0.5))],
         {"fsdp": [(1, 1.0), (2, 2.0)]}),
        # Curves of other circumstances are named by them.
        ([*MIXED, *(changed(one, world={"preset": "library-defaults"}) for one in MIXED)],
         {f"ddp ({preset})": [(1, 1.0), (2, 2.0)] for preset in ("like-for-like", "library-defaults")}),
        ([laid_out(1, 1, 1.0), laid_out(1, 2, 0.5),
          changed(laid_out(1, 2, 0.7), world={"micro_batch_size": 1})],
         {"fsdp (micro-batch 4)": [(1, 1.0), (2, 2.0)],
          "fsdp (micro-batch 1)": [(1, 1.0), (2, round(1 / 0.7, 9))]}),
    ],
    ids=["layouts", "fewest", "nodes", "threads", "gpus", "presets", "micro-batches"],
)  # fmt: skip
def test_curves_join_what_can_be_compared(
    records: list[Record], curves: dict[str, list[tuple[int, float]]]
) -> None:
    found = strong_scaling(rows(*records))
    assert curves == {
        curve[0].curve: [(point.group.world_size, round(point.speed_up, 9)) for point in curve]
        for curve in found
    }


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
        changed(run("ddp", ranks, 0.8 * slow / (1 if ranks == 1 else 1.6)), repeat=number)
        for number, slow in enumerate(slowing)
        for ranks in (1, 2)
    ]
    (curve,) = strong_scaling(rows(*records))
    ratio = curve[-1].ratio
    assert (curve[0].speed_up, curve[-1].speed_up) == (1.0, pytest.approx(1.6))
    assert (ratio.extent.low, ratio.extent.high) == (pytest.approx(1.6), pytest.approx(1.6))
    assert (ratio.rounds, ratio.order) == (7, "faster")


def test_a_run_that_left_the_reference_is_no_point() -> None:
    alone, steps = run("single", 1, 1.0), make_steps(norms=(4.0, 3.0, 2.5, 2.0), seconds=0.1)
    wrong = changed(run("ddp", 4, 0.1), steps=steps)
    judged = rows(alone, run("ddp", 2, 1.0), wrong)
    assert [row.judgement.parity for row in judged.rows] == ["exact", "exact", "diverged"]
    (curve,) = strong_scaling(judged)
    assert [point.group.world_size for point in curve] == [1, 2]


def test_weak_efficiency_is_of_equal_work_and_layouts_have_curves_of_their_own() -> None:
    """KAUST's weak scaling: the vocabulary dominates, so twice the layers are not twice the model."""
    (curve,) = weak_scaling(rows(growing("fsdp", 2, 1.0), growing("fsdp", 4, 2.0)))
    assert [(point.weak_efficiency, point.work_ratio) for point in curve] == [(1.0, 1.0), (0.5, 1.0)]
    larger = growing(
        "fsdp", 4, 1.1, initial_weights=WeightsPart(digest="a", l2_norm=1.0, parameter_count=1200)
    )
    (curve,) = weak_scaling(rows(growing("fsdp", 2, 1.0), larger))
    assert curve[-1].work_ratio == pytest.approx(1.2)
    two_nodes = changed(growing("fsdp", 4, 1.0), world={"nodes": 2, "ranks_per_node": 2})
    found = weak_scaling(rows(growing("fsdp", 2, 1.0), growing("fsdp", 4, 1.0), two_nodes))
    assert [[point.group.record.world.nodes for point in curve] for curve in found] == [[1, 1], [1, 2]]
    assert [curve[-1].curve for curve in found] == ["fsdp (1 node)", "fsdp (2 nodes)"]


def test_one_job_and_jobs_that_differ_in_more_than_size_are_no_weak_scaling() -> None:
    assert weak_scaling(rows(run("ddp", 2, 1.0), run("ddp", 4, 1.0))) == []
    other = changed(growing("fsdp", 4, 1.0), job={"optimizer": OptimizerSection(learning_rate=1.0)})
    assert weak_scaling(rows(growing("fsdp", 2, 1.0), other)) == []


OTHER_WEIGHTS = {"initial_weights": make_weights("d" * 64)}


def odd(label: str = "zero1", **changes: object) -> Record:
    """A fast run of other initial weights."""
    return make_record(label=label, **(OTHER_WEIGHTS | {"steps": make_steps(seconds=0.01)} | changes))


def test_the_main_table_leaves_it_out_and_a_table_below_says_why() -> None:
    comparison = Comparison([make_record(), make_record(label="ddp"), odd()])
    main, _, apart = terminal_table(comparison, wide=True).partition("\n\n")
    assert "zero1" not in main
    assert [line.split()[1:5] for line in main.splitlines()[2:]] == [
        ["1", "ok", "2,048", "n/a"], ["2", "ok", "2,048", "n/a"],
    ]  # fmt: skip
    assert apart.startswith("not comparable: ")
    assert all(words in apart for words in ("zero1", "initial weights", "d" * 12, "a" * 12))
    document = comparison.as_json()
    (apart,) = document["not_comparable"]
    assert (apart["backend"], apart["world_size"], apart["beside"]) == ("zero1", 2, "run-single-n1")
    assert apart["differences"] == [
        {"field": "initial weights", "reference": "a" * 64, "given": "d" * 64,
         "kind": "initial-weights-differ"},
    ]  # fmt: skip
    assert [row["backend"] for row in document["rows"]] == ["single", "ddp", "zero1"]


def test_the_report_sets_it_apart_from_verdict_tables_and_pictures() -> None:
    comparison = Comparison([make_record(), make_record(label="ddp"), odd()])
    document = short_document(comparison, "all", details_document(comparison))
    pictures = {picture.key: picture.key for picture in document.pictures()}
    assert document.details is not None
    short = render_markdown(document, pictures, "", "details.md")
    text = render_details(document.details, pictures, "report.md")
    named = [line for line in short.splitlines() if "zero1" in line]
    assert any(line.startswith("| Completed | ") for line in named)
    assert not any(line.startswith(("| Fastest | ", "| Least memory | ")) for line in named)
    assert "zero1" not in short.partition("## Results")[2].partition("\n## ")[0]
    assert "| zero1" in text.partition("## Not comparable, and why")[2].partition("##")[0]
    for section in ("## Results", "## Time", "## Memory", "## Scaling"):
        assert "zero1" not in text.partition(section)[2].partition("\n## ")[0]
    for picture in document.pictures():
        assert "zero1" not in picture.caption


def test_one_repeat_of_another_job_leaves_the_other_repeats() -> None:
    records = [make_record(), make_record(label="ddp"), odd("ddp", repeat=1, run_id="ddp-1")]
    comparison = Comparison(records)
    assert [row.record.repeat for row in comparison.comparable.rows] == [0, 0]
    assert [row.record.repeat for row in comparison.not_comparable.rows] == [1]


def test_a_job_without_reference_beside_one_that_has_it_stands_apart() -> None:
    other = make_record(label="ddp", job_id="b" * 12, training={"global_batch_size": 16})
    comparison = Comparison([make_record(), make_record(label="zero1"), other])
    (apart,) = comparison.not_comparable.rows
    assert [d.field for d in apart.judgement.not_same_job][:2] == ["training.global_batch_size", "job_id"]
    # Told once for the whole table, not once more for each field.
    assert [finding.id for finding in comparison.findings] == ["several-jobs"]
    script = ObservationPart(command=["train.py"], frameworks=[])
    failed = changed(other, status="failed", steps=[], observation=script)
    assert told([make_record(), failed], "several-jobs") == []


def test_two_jobs_with_a_reference_each_are_both_judged_and_so_is_one_with_dropout() -> None:
    second = {"job_id": "b" * 12}
    comparison = Comparison([make_record(), make_record(**second), make_record(label="ddp", **second)])
    assert comparison.not_comparable.rows == []
    dropout = {"model": {"dropout": 0.1}}
    apart = Comparison([make_record(**dropout), odd(**dropout)]).not_comparable.rows
    assert [row.record.backend.label for row in apart] == ["zero1"]


def test_without_a_reference_the_run_that_most_agree_with_stands_in() -> None:
    lost = make_record(status="oom", steps=[], ranks=[])
    comparison = Comparison([lost, odd("fsdp"), make_record(label="ddp"), make_record(label="zero1")])
    (apart,) = comparison.not_comparable.rows
    assert (apart.record.backend.label, apart.same_job_as.label) == ("fsdp", "ddp")
    assert "ddp has" in (apart.judgement.reason or "")
    (finding,) = (f for f in comparison.findings if f.id == "initial-weights-differ")
    assert "from ddp, as the reference has no result" in finding.message


def test_strong_scaling_leaves_it_out_and_weak_scaling_keeps_jobs_that_grow_with_the_ranks() -> None:
    one, two = (make_record(label="ddp", world_size=size) for size in (1, 2))
    assert len(strong_scaling(Comparison([make_record(), one, two]))) == 1
    broken = make_record(label="ddp", world_size=2, **OTHER_WEIGHTS)
    assert strong_scaling(Comparison([make_record(), broken, one])) == []
    grown = make_record(label="ddp", world_size=4, job_id="b" * 12, training={"global_batch_size": 16})
    (curve,) = weak_scaling(Comparison([make_record(), two, grown]))
    assert [point.group.world_size for point in curve] == [2, 4]


def test_a_baseline_leaves_it_out_of_changes_and_says_why() -> None:
    comparison = Comparison([make_record(), odd()])
    document = before_after(comparison, comparison)
    text = render_markdown(document, {}, "", "details.md")
    (named,) = [line for line in text.splitlines() if "zero1" in line]
    assert "Compared with none, 2 runs of another job" in named
    assert "zero1 on 2 ranks before: initial weights differ" in named
    keys = [table.key for table in document.tables()]
    assert len(keys) == len(set(keys))


def running(label: str, world_size: int = 2, **effective: object) -> Record:
    return make_record(label=label, world_size=world_size, effective=effective)


def differing(*records: Record) -> list[DifferingSetting]:
    return Comparison([running("single", 1, prefetch="none"), *records]).settings


def test_each_value_comes_with_its_cells_and_the_reference_first() -> None:
    (setting,) = differing(
        running("zero1", prefetch="8 elements"),
        running("zero2", prefetch="8 elements"),
        running("ddp", prefetch="none"),
    )
    single, ddp, zero1, zero2 = (
        {"backend": label, "world_size": size}
        for label, size in (("single", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2))
    )
    assert setting.as_json() == {
        "job_id": "0123456789ab", "setting": "prefetch", "changes": "cost",
        "values": [
            {"value": "none", "cells": [single, ddp], "is_of_reference": True},
            {"value": "8 elements", "cells": [zero1, zero2], "is_of_reference": False},
        ],
    }  # fmt: skip
    assert json.loads(json.dumps(setting.as_json())) == setting.as_json()


def test_what_changes_the_mathematics_comes_first() -> None:
    own = {"prefetch": "all", "gradient_clipping": None, "optimizer_implementation": "foreach"}
    found = differing(running("ddp", **own), running("zero3", optimizer_implementation="for-loop"))
    assert [(s.setting, s.effect) for s in found] == [
        ("gradient clipping", "mathematics"), ("optimizer implementation", "cost"), ("prefetch", "cost"),
    ]  # fmt: skip
    assert [value.value for value in found[0].values] == ["1", "none"]


def test_backends_are_held_against_each_other_where_the_reference_does_not_know() -> None:
    (setting,) = differing(running("ddp", gather_dtype="float32"), running("zero3", gather_dtype="bfloat16"))
    assert setting.setting == "dtype of gathering"
    assert not any(value.is_of_reference for value in setting.values)
    # Equal and unknown ones are left out, and those of another job.
    assert differing(running("ddp", prefetch="none"), running("zero1", prefetch=None)) == []
    assert differing(changed(running("ddp", prefetch="all"), **OTHER_WEIGHTS)) == []


def test_the_report_has_a_line_for_each_value_and_the_terminal_says_where_they_are() -> None:
    comparison = Comparison([
        running("single", 1, prefetch="none"), running("zero1", prefetch="8 elements"), running("ddp"),
    ])  # fmt: skip
    table = settings_section(comparison).blocks[1]
    assert table.texts() == [  # type: ignore[union-attr]
        ["prefetch", "cost only", "none", "single on 1 rank"],
        ["prefetch", "cost only", "8 elements", "zero1 on 2 ranks"],
    ]
    assert where_to_read(comparison) == []  # costs alone: no reader's decision needs them beside the table
    unclipped = Comparison([running("single", 1), running("ddp", gradient_clipping=None, prefetch="all")])
    said = "settings that differ and may change the training: gradient clipping (values: --json, or "
    assert where_to_read(unclipped)[1].startswith(said)
    assert where_to_read(Comparison([make_record(), make_record(label="ddp")])) == []
