import re

import pytest

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
        f"As far as {len(LOSSES)} steps and an assumed limit show, all 2 judged configurations train the "
        "same model as one process: losses agree within"
    )
    limit = r"limit \d.\de-\d\d: 100 roundings of fp32"
    assert re.search(rf"1.0e-05 nats per token \({limit}\)\.$", text)


def test_a_limit_that_a_repetition_measured_is_told_without_its_source() -> None:
    near = make_steps([loss + 1e-6 for loss in LOSSES])
    other = make_record(label="single:micro_batch_size=1", steps=near)
    text = parity(make_record(), other, make_record(label="ddp", steps=near))
    assert re.search(r"\(limit \d.\de-\d\d\) over", text)


@pytest.mark.parametrize(("moved", "is_test"), [(1.0, True), (1e-3, False)])
def test_final_weights_prove_nothing_where_rounding_moves_them_as_far_as_training(
    moved: float, is_test: bool
) -> None:
    """Weights of norm 10 in bf16: three roundings are 0.12 of a distance of 1, and 120 of one of 1e-3."""
    first, last = [10.0, *[0.0] * 8], [10.0, *[moved] * 8]

    def run(label: str, digest: str, weights: list[float], loss: float) -> Record:
        return make_record(
            label=label, training={"precision": "bf16"}, steps=make_steps([at + loss for at in LOSSES]),
            initial_weights=make_weights(sketch={"weight": first}),
            final_weights=make_weights(digest * 64, sketch={"weight": weights}),
        )  # fmt: skip

    text = parity(run("single", "b", last, 0.0), run("ddp", "c", first if not is_test else last, 1e-3))
    assert ": 3 roundings of bf16)" in text
    assert ("final weights cannot tell: their limit is 117 x the distance" in text) is not is_test


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
    refused = make_record(status="unsupported", reasons=["cannot fit: 131 GB of 80 GB per rank"])
    assert parity(refused, make_record(label="ddp")) == (
        "No loss could be compared with a reference: single on 1 rank: cannot fit: 131 GB of 80 GB per rank."
    )


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
