import json
from typing import Any

import pytest

from harness.judge.agreement.parity import is_variant
from harness.judge.comparison import Comparison
from harness.judge.rows import reason
from harness.record import ErrorPart
from tests.records import ENVIRONMENT, LOSSES, make_record, make_steps

ROW_KEYS = {
    "backend", "world_size", "repeat", "job_id", "status", "reason", "run_id", "tokens_per_second",
    "samples_per_second", "evaluation_samples_per_second", "step_seconds", "own_step_seconds", "peak_bytes",
    "model_state_bytes", "expected_model_state_bytes",
    "sent_bytes_per_step", "expected_sent_bytes_per_step", "textbook_sent_bytes_per_step",
    "transport_sent_bytes_per_step", "max_loss_difference", "max_grad_norm_difference",
    "final_weights_difference", "update_difference", "first_divergent_step", "host_peak_bytes",
    "predicted_peak_bytes", "reserved_bytes", "parity",
    "parity_reason", "not_judged",
}  # fmt: skip
COMPARED_KEYS = ROW_KEYS | {
    "speed_base", "speed_ratio", "speed_ratio_low", "speed_ratio_high", "speed_order", "parity_run"
}  # fmt: skip
"""Of the cell, in the document."""


def test_a_row_holds_every_key_whatever_the_run_gave() -> None:
    comparison = Comparison(
        [make_record(), make_record(label="ddp", status="failed", steps=[], ranks=[], windows=None)]
    )
    assert [set(row.as_json()) for row in comparison.rows] == [ROW_KEYS, ROW_KEYS]


def test_document_is_json_and_holds_the_job() -> None:
    document = Comparison([make_record(), make_record(label="ddp")]).as_json()
    assert json.loads(json.dumps(document)) == document
    assert set(document) == {
        "job_id", "job_ids", "rows", "not_comparable", "noise", "repeat_spreads", "settings", "findings",
    }  # fmt: skip
    assert all(set(row) == COMPARED_KEYS for row in document["rows"])
    assert document["job_id"] == "0123456789ab"
    assert [row["parity"] for row in document["rows"]] == ["exact", "exact"]


def test_document_of_several_jobs_names_no_single_one() -> None:
    document = Comparison([make_record(), make_record(job_id="b" * 12)]).as_json()
    assert document["job_id"] is None
    assert document["job_ids"] == ["0123456789ab", "b" * 12]


def test_each_run_is_judged_by_the_reference_of_its_own_job() -> None:
    losses = [loss + 1 for loss in LOSSES]
    second = {"job_id": "b" * 12, "steps": make_steps(losses)}
    comparison = Comparison(
        [make_record(label="ddp", **second), make_record(), make_record(label="single", **second)]
    )
    assert [row.judgement.parity for row in comparison.rows] == ["exact", "exact", "exact"]


def test_run_without_a_reference_of_its_job_is_unjudged() -> None:
    comparison = Comparison([make_record(), make_record(label="ddp", job_id="b" * 12)])
    assert comparison.rows[1].judgement.parity == "unjudged"


def test_a_reference_that_worked_is_preferred_to_one_that_failed() -> None:
    comparison = Comparison([make_record(status="failed"), make_record(), make_record(label="ddp")])
    assert comparison.rows[2].judgement.parity == "exact"


def test_a_reference_with_words_in_brackets_is_still_the_reference() -> None:
    newer = make_record(run_id="newer", environment=ENVIRONMENT | {"python": "3.13.0"})
    comparison = Comparison([make_record(), newer])
    assert [row.label for row in comparison.rows] == [
        "single (python 3.12.0)",
        "single (python 3.13.0)",
    ]
    assert not any(is_variant(row.record) for row in comparison.rows)
    assert is_variant(make_record(label="single:micro_batch_size=4"))


ERROR = {"kind": "ValueError", "message": "odd", "rank": 1}


@pytest.mark.parametrize(
    ("status", "reasons", "error", "told"),
    [
        ("ok", [], None, None),
        (
            "failed",
            [],
            {"kind": "RuntimeError", "message": "first\nsecond", "rank": 3},
            "RuntimeError (rank 3): first",
        ),
        ("failed", [], {"kind": "KeyError", "message": ""}, "KeyError: no message"),
        (
            "failed",
            [],
            ERROR | {"step": 3, "phase": "backward"},
            "ValueError (rank 1, step 3, backward): odd",
        ),
        ("failed", [], ERROR | {"phase": "setup"}, "ValueError (rank 1, setup): odd"),
        ("unsupported", ["too old", "no GPU"], None, "too old; no GPU"),
    ],
)
def test_a_reason_names_error_rank_step_and_phase(
    status: str, reasons: list[str], error: dict[str, Any] | None, told: str | None
) -> None:
    part = ErrorPart(**error) if error else None
    assert reason(make_record(status=status, reasons=reasons, error=part)) == told
