import re

from harness.judge.comparison import Comparison
from harness.record import ErrorPart, Record
from harness.tell.short.verdict import endings_sentence, parity_sentence
from tests.records import LOSSES, NORMS, make_record, make_steps, make_weights

WRONG = {"steps": make_steps(norms=(4.0, 3.0, 2.5, 2.0)), "final_weights": make_weights("e" * 64)}


def parity(*records: Record) -> str:
    return parity_sentence(Comparison(records))


def endings(*records: Record) -> str:
    return endings_sentence(Comparison(records))


def test_agreement_is_told_with_its_extent() -> None:
    assert parity(make_record(), make_record(label="ddp")) == (
        "The one judged configuration trains the same model as one process: losses agree bit for bit "
        f"over {len(LOSSES)} steps."
    )
    near = make_steps([loss + 1e-5 for loss in LOSSES])
    text = parity(make_record(), make_record(label="ddp"), make_record(label="fsdp", steps=near))
    assert text.startswith(
        "All 2 judged configurations train the same model as one process: losses agree within"
    )
    assert re.search(rf"1.0e-05 nats per token \(limit \d.\de-\d\d\) over {len(LOSSES)} steps\.$", text)


def test_a_cell_that_diverged_is_named_with_how_far() -> None:
    text = parity(make_record(), make_record(label="ddp"), make_record(label="zero1", **WRONG))
    assert text.startswith("1 of 2 judged configurations train the same model as one process")
    assert "; zero1 on 2 ranks diverges (gradient norm by up to 100 %)." in text


def test_only_a_cell_that_diverged_claims_no_agreement() -> None:
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    text = parity(
        make_record(), make_record(label="zero1", steps=doubled, final_weights=make_weights("c" * 64))
    )
    assert "same model" not in text
    assert "diverges" in text


def test_without_a_reference_nothing_is_claimed() -> None:
    assert parity(make_record(label="ddp")) == "No loss could be compared with a reference."
    assert parity(make_record()) == ""


def test_cells_that_did_not_fit_are_named() -> None:
    error = ErrorPart(kind="OutOfMemoryError", message="no memory", rank=0)
    lost = make_record(label="ddp", status="oom", error=error, steps=[], ranks=[])
    assert (
        endings(make_record(), lost)
        == "1 of 2 configurations completed, 1 ran out of memory (ddp on 2 ranks)."
    )
    assert endings(make_record(), make_record(label="ddp")) == "Both configurations completed."


def test_a_cell_that_ran_alone_is_named() -> None:
    failed = make_record(label="ddp", status="failed", steps=[], ranks=[], comm=[], windows=None)
    assert endings(failed) == "The only configuration, ddp on 2 ranks, did not complete: failed."


def test_backends_that_are_wrong_on_purpose_are_named_as_such() -> None:
    assert "faulty" not in endings(make_record(), make_record(label="ddp"))
    text = endings(make_record(), make_record(label="planted-wrong-beta2"))
    assert text == "Both configurations completed; planted-wrong-beta2 is deliberately faulty."


def test_runs_of_another_job_are_named() -> None:
    apart = make_record(label="fsdp", initial_weights=make_weights("d" * 64))
    text = endings(make_record(), make_record(label="ddp"), apart)
    assert text == "Both configurations completed; not comparable: fsdp on 2 ranks ran a different job."
