"""Figures of one run are computed once and kept as long as the run."""

import gc
from weakref import ref

from harness.judge import quantities
from harness.judge.comparison import Comparison
from harness.judge.quantities import Run
from tests.records import make_record


def test_a_figure_is_computed_once_and_forgotten_with_its_run(monkeypatch) -> None:
    asked = []

    def median(record):
        asked.append(record.run_id)
        return 1.0

    monkeypatch.setattr(quantities, "median_step_seconds", median)
    first, second = Run.of(make_record(run_id="a")), Run.of(make_record(run_id="b"))
    assert [run.median_step_seconds for run in (first, second, first)] == [1.0, 1.0, 1.0]
    assert asked == ["a", "b"]
    del first
    assert Run.of(make_record(run_id="c")).median_step_seconds == 1.0
    assert asked == ["a", "b", "c"]


def test_a_changed_copy_of_a_record_has_figures_of_its_own() -> None:
    record = make_record()
    assert len(Run.of(record).step_seconds) > 0
    assert Run.of(record.model_copy(update={"steps": []})).step_seconds == []


def test_everything_that_was_computed_dies_with_the_comparison() -> None:
    comparison = Comparison([make_record(), make_record(label="ddp")])
    comparison.as_json()
    row = ref(comparison.rows[0])
    del comparison
    gc.collect()
    assert row() is None


def test_parts_of_a_comparison_keep_its_rows_as_they_were_judged() -> None:
    comparison = Comparison([make_record(), make_record(label="ddp")])
    assert comparison.comparable is comparison
    assert comparison.by_job[comparison.rows[0].record.job_id].rows == comparison.rows
    assert comparison.findings is comparison.findings
