"""Faults of public jobs that the labs offer `as-written`: each is planted and must be named."""

import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.record import Record
from tests.docs.markdown import ROOT
from tests.records import changed
from tests.representatives import EXHAUSTIVE, first

from .matrix import Matrix

pytestmark = pytest.mark.long(seconds=15)
LENGTH = 96
QUESTIONS = (
    "data.source=squad", f"data.path={ROOT / 'configs' / 'labs' / 'questions.json'}",
    f"data.sequence_length={LENGTH}",
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    f"num_key_value_heads: 2, max_position_embeddings: {LENGTH}}}",
)  # fmt: skip
ANSWERED = (*QUESTIONS, "evaluation.every_steps=3", "evaluation.samples=8", "evaluation.answer_tokens=6")


def found(findings: list[Finding], kind: str) -> Finding:
    named = [finding for finding in findings if finding.id == kind]
    assert len(named) == 1, [(finding.id, finding.message) for finding in findings]
    return named[0]


def test_an_answer_as_labels_of_the_prompt_is_named(matrix: Matrix) -> None:
    findings = matrix.findings(["ddp"], 2, (*QUESTIONS, "data.targets=text over prompt"))
    named = found(findings, "labels-misplaced")
    assert named.backends == ("ddp", "single")
    assert named.values["misplaced_labels"] > 0.5 * named.values["target_tokens"]


@pytest.mark.parametrize("targets", first(["text"], ["text", "all", "prompt"]))
def test_labels_in_their_places_are_not(targets: str, matrix: Matrix) -> None:
    findings = matrix.findings(["ddp"], 2, (*QUESTIONS, f"data.targets={targets}"))
    assert [(finding.id, finding.message) for finding in findings] == []


def test_fsdp1_without_a_wrap_policy_is_named_and_nothing_else_is(matrix: Matrix) -> None:
    findings = matrix.findings(["fsdp1:auto_wrap=none", "fsdp1"], 2)
    assert found(findings, "one-wrap-unit").backends == ("fsdp1:auto_wrap=none",)
    assert {finding.id for finding in findings} == {"one-wrap-unit"}


LABELS = ("ddp", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp1")
SHARDED = ("zero3", "fsdp")
"""They gather weights for each token; others hold them whole."""


@pytest.mark.parametrize("labels", [SHARDED, pytest.param(LABELS, marks=EXHAUSTIVE)])
@pytest.mark.costly
def test_every_strategy_generates_the_same_answers(labels: tuple[str, ...], matrix: Matrix) -> None:
    comparison = matrix.compare(labels, 2, ANSWERED)
    texts = {
        row.label: {answer.sample: answer.text for answer in row.record.answers.given}
        for row in comparison.rows
        if row.record.answers
    }
    assert set(texts) == {"single", *labels}
    assert len(texts["single"]) == 8
    assert all(given == texts["single"] for given in texts.values())
    assert "answers-differ" not in {finding.id for finding in comparison.findings}


def test_answers_of_other_weights_are_named(matrix: Matrix) -> None:
    comparison = matrix.compare(["fsdp"], 2, ANSWERED)
    known = matrix._records.items()
    records = [
        record
        for (label, _, settings), record in known
        if label.partition(":")[0] in ("single", "fsdp") and settings[: len(ANSWERED)] == ANSWERED
    ]
    assert found(Comparison(map(with_other_answers, records)).findings, "answers-differ").backends == (
        "fsdp",
    )
    assert "answers-differ" not in {finding.id for finding in comparison.findings}


def with_other_answers(record: Record) -> Record:
    """What a rank would say that generated on weights of its own."""
    assert record.answers is not None
    if record.backend.name != "fsdp":
        return record
    first, *rest = record.answers.given
    given = [first.model_copy(update={"text": f"{first.text} and more"}), *rest]
    return changed(record, answers={"given": given})
