from harness.judge.comparison import Comparison
from harness.record import Record
from harness.record.workload import known_strategy
from harness.tell.short.verdict import checks_sentence
from tests.records import NORMS, make_record, make_steps, make_weights, published


def checks(*records: Record) -> str:
    return checks_sentence(Comparison(records))


def test_agreement_by_an_assumed_limit_says_so() -> None:
    """Where no repetition of the reference measured what rounding does."""
    text = checks(*published("bloom-560m"))
    assert text.startswith("15 of 15 checks hold: all 5 agree with one process (assumed limit), hold the")


def test_a_byte_too_many_is_not_as_expected() -> None:
    """On published runs of two ranks, where a ring sends what is paid in: 16 bytes more in every step."""
    records = [*published("default")]
    alone, ddp = (next(r for r in records if r.backend.label == label) for label in ("single", "ddp"))
    assert checks(alone, ddp) == (
        "3 of 3 checks hold: 1 of 1 agree with one process (assumed limit), 1 of 1 hold the expected states "
        "and 1 of 1 send the expected bytes."
    )
    zero2 = next(r for r in records if r.backend.label == "zero2")
    assert checks(alone, ddp, zero2) == (
        "6 of 6 checks hold: all 2 agree with one process (assumed limit), hold the expected states and send "
        "the expected bytes."
    )
    probed = ddp.windows.probed if ddp.windows else 0
    comm = [
        row.model_copy(update={"payload_bytes": row.payload_bytes + 16 * probed * (row.phase == "backward")})
        for row in ddp.comm
    ]
    text = checks(alone, ddp.model_copy(update={"comm": comm}))
    assert text.startswith("2 of 3 checks hold: ")
    assert text.endswith("; other bytes: ddp on 2 ranks (+16 bytes).")


def test_norms_of_what_claims_a_strategy_are_set_aside() -> None:
    records = [*published("default")]
    (ddp,) = (record for record in records if record.backend.label == "ddp" and record.repeat == 0)
    claim = known_strategy(ddp)
    backend = ddp.backend.model_copy(update={"name": "observed-ddp", "label": "observed-ddp", "claim": claim})
    comm = [
        row.model_copy(update={"payload_bytes": row.payload_bytes + 16 * (row.phase == "backward")})
        for row in ddp.comm
    ]
    text = checks(ddp.model_copy(update={"backend": backend, "comm": comm}))
    assert "1 of 1 send the expected bytes" in text
    assert "; as expected except for norms and flags: observed-ddp on 2 ranks (+" in text
    assert "other bytes" not in text


def test_cells_without_a_closed_form_are_named_and_no_check_that_holds() -> None:
    assert checks(make_record(label="ddp")) == "No closed form for ddp on 2 ranks."


def test_a_cell_that_diverged_is_a_check_that_fails() -> None:
    doubled = make_steps(norms=[2 * norm for norm in NORMS])
    wrong = make_record(label="zero1", steps=doubled, final_weights=make_weights("c" * 64))
    assert checks(make_record(), make_record(label="ddp"), wrong).startswith(
        "1 of 2 checks hold: 1 of 2 agree with one process (assumed limit); "
    )
