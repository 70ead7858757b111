"""Bubble and stages of a pipeline's record, and the findings that only pipelines have."""

from __future__ import annotations

import numpy as np
import pytest

from harness.forms.pipeline import bubble_share
from harness.judge.comparison import Comparison
from harness.judge.quantities import idle_share, pipeline_use
from harness.tell.document import Table
from harness.tell.sections.amounts import pipeline_section
from tests.pipelines import OTHER, SAME, SHARED, make_pipeline
from tests.records import make_record


def test_bubble_is_predicted_from_the_schedule_and_measured_from_waiting() -> None:
    use = pipeline_use(make_pipeline())
    assert use is not None
    assert use.expected_bubble == pytest.approx(1 / 5)
    assert use.measured_bubble == pytest.approx((1 / 4 + 2 / 4) / 2)


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_a_rank_waits_until_the_last_one_has_ended(micro_batches: int) -> None:
    """GPipe on 2 ranks by a clock of equal ticks: the second begins a tick later and ends a tick sooner."""
    computing = np.array([[2.0 * micro_batches], [2.0 * micro_batches]])
    until_last = computing + np.array([[2.0], [1.0]])
    share = idle_share(computing, until_last, [0, 0])
    assert share == pytest.approx(bubble_share(ranks=2, micro_batches=micro_batches))


def test_pipelines_do_not_wait_for_each_other_in_their_passes() -> None:
    computing, until_last = np.full((4, 3), 2.0), np.array([[4.0], [3.0], [2.0], [2.0]]) * np.ones(3)
    assert idle_share(computing, until_last, [0, 0, 1, 1]) == pytest.approx((1 / 2 + 1 / 2 + 0 + 0) / 4)


def test_messages_are_told_apart_by_what_they_carry() -> None:
    use = pipeline_use(make_pipeline())
    assert use is not None
    assert [(stage.activation_bytes, stage.gradient_bytes) for stage in use.by_rank] == [(4096, 0), (0, 4096)]
    assert [stage.blocks for stage in use.by_rank] == [1, 1]


def test_other_strategies_have_no_stages() -> None:
    assert pipeline_use(make_record(label="ddp")) is None
    assert pipeline_section(Comparison([make_record(label="ddp")])) is None


def test_the_section_has_a_line_per_pipeline_and_per_rank() -> None:
    section = pipeline_section(Comparison([make_pipeline()]))
    assert section is not None
    tables = {block.key: block for block in section.blocks if isinstance(block, Table)}
    assert [len(tables[key].rows) for key in ("pipelines", "pipeline_stages")] == [1, 2]


def test_copies_of_a_tied_weight_that_came_apart_are_named() -> None:
    apart = Comparison([make_pipeline((SAME, OTHER))]).findings
    assert [f.values for f in apart if f.id == "tied-weight-apart"] == [{"weights": SHARED}]
    assert not any(f.id == "tied-weight-apart" for f in Comparison([make_pipeline()]).findings)
