"""Runs that are not the same job stand apart everywhere."""

from harness.judge.comparison import Comparison, strong_scaling, weak_scaling
from harness.record import Record
from harness.tell.before_after import before_after
from harness.tell.first_page import short_document
from harness.tell.report import details_document
from harness.tell.tables import main_table, not_comparable_table
from harness.tell.writers.markdown import render_details, render_markdown
from tests.records import make_record, make_steps, make_weights

OTHER_WEIGHTS = {"initial_weights": make_weights("d" * 64)}


def odd(label: str = "zero1", **changes: object) -> Record:
    """A fast run of other initial weights."""
    return make_record(label=label, **(OTHER_WEIGHTS | {"steps": make_steps(seconds=0.01)} | changes))


def test_the_main_table_leaves_it_out_and_a_table_below_says_why() -> None:
    text = main_table(Comparison([make_record(), make_record(label="ddp"), odd()]))
    main, _, apart = text.partition("\n\n")
    assert "zero1" not in main
    assert [line.split()[1:5] for line in main.splitlines()[2:]] == [
        ["1", "ok", "2,048", "n/a"],
        ["2", "ok", "2,048", "n/a"],
    ]
    assert apart.startswith("not comparable: ")
    assert "zero1" in apart
    assert "initial weights" in apart
    assert "d" * 12 in apart
    assert "a" * 12 in apart


def test_nothing_is_said_where_all_are_one_job() -> None:
    comparison = Comparison([make_record(), make_record(label="ddp")])
    assert not_comparable_table(comparison) is None
    assert "not comparable" not in main_table(comparison)


def test_the_document_names_each_field_with_both_values() -> None:
    document = Comparison([make_record(), odd()]).as_json()
    (apart,) = document["not_comparable"]
    assert (apart["backend"], apart["world_size"], apart["beside"]) == ("zero1", 2, "run-single-n1")
    assert apart["differences"] == [
        {"field": "initial weights", "reference": "a" * 64, "given": "d" * 64,
         "kind": "initial-weights-differ"},
    ]  # fmt: skip
    assert [row["backend"] for row in document["rows"]] == ["single", "zero1"]


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


def test_two_jobs_with_a_reference_each_are_both_judged() -> None:
    second = {"job_id": "b" * 12}
    comparison = Comparison([make_record(), make_record(**second), make_record(label="ddp", **second)])
    assert comparison.not_comparable.rows == []


def test_without_a_reference_the_run_that_most_agree_with_stands_in() -> None:
    lost = make_record(status="oom", steps=[], ranks=[])
    comparison = Comparison([lost, odd("fsdp"), make_record(label="ddp"), make_record(label="zero1")])
    (apart,) = comparison.not_comparable.rows
    assert apart.record.backend.label == "fsdp"
    assert apart.same_job_as is not None
    assert apart.same_job_as.label == "ddp"
    assert "ddp has" in (apart.judgement.reason or "")
    (finding,) = (f for f in comparison.findings if f.id == "initial-weights-differ")
    assert "from ddp, as the reference has no result" in finding.message


def test_a_job_with_dropout_is_still_held_against_its_reference() -> None:
    dropout = {"model": {"dropout": 0.1}}
    comparison = Comparison([make_record(**dropout), odd(**dropout)])
    assert [row.record.backend.label for row in comparison.not_comparable.rows] == ["zero1"]


def test_strong_scaling_leaves_it_out() -> None:
    sizes = [make_record(label="ddp", world_size=size) for size in (1, 2)]
    assert len(strong_scaling(Comparison([make_record(), *sizes]))) == 1
    broken = [make_record(label="ddp", world_size=2, **OTHER_WEIGHTS), sizes[0]]
    assert strong_scaling(Comparison([make_record(), *broken])) == []


def test_weak_scaling_keeps_jobs_that_grow_with_the_ranks() -> None:
    grown = make_record(label="ddp", world_size=4, job_id="b" * 12, training={"global_batch_size": 16})
    comparison = Comparison([make_record(), make_record(label="ddp"), grown])
    (curve,) = weak_scaling(comparison)
    assert [point.group.world_size for point in curve] == [2, 4]


def test_a_baseline_leaves_it_out_of_changes_and_shows_it_on_its_side() -> None:
    comparison = Comparison([make_record(), odd()])
    document = before_after(comparison, comparison)
    text = render_markdown(document, {}, "", "details.md")
    assert "zero1" not in text.partition("## Each side")[0]
    assert "Not comparable, and why" in text.partition("## Each side")[2]
    keys = [table.key for table in document.tables()]
    assert len(keys) == len(set(keys))
