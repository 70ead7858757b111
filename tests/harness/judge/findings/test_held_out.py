"""Held-out losses are held to the limit of the training's."""

from __future__ import annotations

from typing import Any

import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.record import EvaluationPart, LayoutPart, TensorPart
from tests.records import LOSSES, make_record, make_steps


def evaluated(*losses: float | None) -> list[EvaluationPart]:
    return [EvaluationPart(step=2 * (i + 1), loss=loss, target_tokens=100) for i, loss in enumerate(losses)]


def found(*losses: float | None, **changes: Any) -> list[Finding]:
    record = make_record(label="ddp", eval=evaluated(*losses), **changes)
    findings = Comparison([make_record(eval=evaluated(5.0, 4.0)), record]).findings
    return [finding for finding in findings if finding.id == "held-out-loss-differs"]


def test_equal_losses_and_rounding_are_no_finding() -> None:
    assert found(5.0, 4.0) == found(5.0, 4.0 + 1e-6) == []


@pytest.mark.parametrize("second", [3.0, None])
def test_the_first_step_that_differs_is_named(second: float | None) -> None:
    (finding,) = found(5.0, second)
    assert "after 4 steps" in finding.text
    assert finding.values["given"] == second
    assert finding.values["reference"] == 4.0


def test_of_another_training_and_of_running_statistics_nothing_is_said() -> None:
    assert found(5.0, 3.0, steps=make_steps([loss + 1 for loss in LOSSES])) == []
    buffer = TensorPart(name="norm.running_mean", shape=[4], dtype="float32")
    layout = LayoutPart(parameters=[], decaying=[], buffers=[buffer], blocks=[])
    assert found(5.0, 3.0, layout=layout) == []
