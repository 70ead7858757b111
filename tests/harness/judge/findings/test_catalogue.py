from pathlib import Path

from harness.judge.comparison import Comparison
from harness.judge.findings.catalogue import explain, kinds
from tests.records import LOSSES, NORMS, make_effective, make_record, make_steps, make_weights

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "findings.md"


def test_the_document_explains_every_kind(update_golden: bool) -> None:
    if update_golden:
        DOCUMENT.write_text(explain(), encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == explain()


def test_every_kind_says_cause_confirmation_and_remedy() -> None:
    for kind in kinds().values():
        assert all((kind.title, kind.cause, kind.confirm, kind.fix)), kind.id
        assert not kind.title.endswith("."), kind.id


def test_agreement_gives_no_finding() -> None:
    assert Comparison([make_record(), make_record(label="ddp")]).findings == []


def test_divergence_is_a_finding_with_its_size() -> None:
    steps = make_steps(LOSSES, [norm * 2 for norm in NORMS])
    other = make_record(label="zero1", steps=steps, final_weights=make_weights("c" * 64))
    found, cause = Comparison([make_record(), other]).findings
    assert (found.id, cause.id) == ("diverged", "gradient-scale")
    assert "summed over 2 ranks" in cause.message
    assert found.backends == ("zero1",)
    assert found.values["max_grad_norm_difference"] == 1.0


def test_another_job_is_a_finding_with_both_values() -> None:
    other = make_record(label="ddp", initial_weights=make_weights("d" * 64))
    (found,) = Comparison([make_record(), other]).findings
    assert found.id == "initial-weights-differ"
    assert "initial weights" in found.message
    assert found.values == {"reference": "a" * 64, "given": "d" * 64}


def test_different_micro_batches_on_one_world_are_a_finding() -> None:
    ddp, zero = make_record(label="ddp"), make_record(label="zero1")
    world = zero.world.model_copy(update={"micro_batch_size": 2, "accumulation_steps": 2})
    backend = zero.backend.model_copy(update={"effective": make_effective(accumulation_steps=2)})
    other = zero.model_copy(update={"world": world, "backend": backend})
    (found,) = Comparison([make_record(), ddp, other]).findings
    assert found.id == "micro-batch-differs"
    assert found.values == {"4 x 1": ["ddp"], "2 x 2": ["zero1"]}
