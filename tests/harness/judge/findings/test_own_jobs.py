"""Findings on jobs of the user's own choice."""

from harness.judge.comparison import Comparison
from harness.record import LayoutPart, SplitPart, TensorPart
from tests.records import make_record

BUFFERS = [
    TensorPart(name=f"norm.{name}", shape=[4], dtype="float32") for name in ("running_mean", "running_var")
]
LAYOUT = LayoutPart(parameters=[], decaying=[], buffers=BUFFERS, blocks=[])


def found(kind: str, **changes: object) -> list[str]:
    records = [make_record(label=label, **changes) for label in ("single", "ddp")]
    return [finding.message for finding in Comparison(records).findings if finding.id == kind]


def test_bytes_fed_to_pretrained_weights_are_named_once() -> None:
    (message,) = found("bytes-for-pretrained", model={"name": "gpt2", "config": None})
    assert "'gpt2' is fed raw bytes" in message


def test_bytes_for_random_weights_are_no_finding() -> None:
    random = {"name": "gpt2", "config": None, "weights": "random"}
    assert found("bytes-for-pretrained", model=random) == found("bytes-for-pretrained") == []


def test_batch_norm_over_another_micro_batch_is_another_computation() -> None:
    (message,) = found("batch-norm", layout=LAYOUT)
    assert message.startswith(
        "ddp on 2 ranks: layers that normalise over the 4 samples of a rank's micro-batch: 1;"
    )
    assert "over 8 in the reference: another computation" in message
    assert found("batch-norm") == []


def test_norms_that_were_measured_not_to_use_their_batch_are_no_finding() -> None:
    split = SplitPart(difference=1e-9, repetition=0.0, rounding=1e-5)
    assert found("batch-norm", layout=LAYOUT, split=split) == []
    assert len(found("batch-norm", layout=LAYOUT, split=split.model_copy(update={"difference": 0.1}))) == 1


def test_code_of_the_models_folder_is_named_once() -> None:
    (message,) = found("custom-code", model={"name": "toy", "config": None, "trust_remote_code": True})
    assert "model.trust_remote_code is on: Python code of 'toy' ran" in message
    assert found("custom-code") == []
