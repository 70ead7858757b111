"""A loss that the model adds to the cross entropy: seen in a real run, and told from rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.judge.comparison import Comparison
from harness.judge.findings.jobs import added_loss
from harness.record import ModelLossPart, ObservedPart, Record
from tests.harness.cli.command_line import UNTRACED, harness, records
from tests.records import make_record
from tests.representatives import first

MIXTRAL = (
    "model.config={model_type: mixtral, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, num_local_experts: 4, num_experts_per_tok: 2, "
    "max_position_embeddings: 128, output_router_logits: %s, router_aux_loss_coef: 0.01}"
)


def of(model: float, job: float, targets: int = 256) -> Record:
    part = ModelLossPart(model=model, job=job, targets=targets)
    return make_record(observed=ObservedPart(model_loss=part))


@pytest.mark.parametrize("router", first(["true"], ["true", "false"]))
def test_the_loss_of_a_router_is_named_and_rounding_is_not(tmp_path: Path, router: str) -> None:
    done = harness(
        "run", "--backend", "single", *UNTRACED, "--set", MIXTRAL % router, "--set",
        "data.sequence_length=32", "--set", "training.steps=3", "--runs", "runs", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    findings = Comparison(records(tmp_path / "runs")).findings
    found = [finding for finding in findings if finding.id == "model-adds-loss"]
    assert len(found) == (router == "true")
    for finding in found:
        # Four experts, two of each token: the balancing loss is about 2, times 0.01.
        assert 0.01 < finding.values["model_loss"] - finding.values["job_loss"] < 0.04
        assert "is not trained" in finding.message


def test_rounding_is_no_difference() -> None:
    assert added_loss(of(5.355305194854736, 5.355305333291331)) is None
    assert added_loss(of(5.3562, 5.3553)) is not None
    assert added_loss(make_record()) is None
    rounded = {"observed": of(5.25, 5.2605).observed, "training": {"precision": "bf16-mixed"}}
    assert added_loss(make_record(label="accelerate-fsdp", **rounded)) is None, "a wrapper's bfloat16"
    assert added_loss(make_record(**rounded)) is not None, "the reference has no wrapper"
    assert "model-adds-loss" in {finding.id for finding in Comparison([of(6.0, 5.0)]).findings}
