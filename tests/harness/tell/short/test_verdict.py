from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.judge.findings.finding import statements
from harness.record import Record
from harness.tell.document import Items
from harness.tell.short.verdict import NOT_SCALED, NOTHING_RAN, NOTHING_TIMED, trust_lines, verdict_section
from tests.harness.tell.short.records import growing, repeats
from tests.records import NORMS, make_effective, make_record, make_steps, make_weights


def told(question: ReportFocus, *records: Record) -> list[str]:
    """The verdict, then why it may be trusted."""
    comparison = Comparison(records)
    (block,) = verdict_section(comparison, question).blocks
    assert isinstance(block, Items)
    return [line.text for line in (*block.lines(), *trust_lines(comparison, question))]


def test_three_to_six_sentences() -> None:
    questions: list[ReportFocus] = ["all", "speed", "memory"]
    for question in questions:
        assert 3 <= len(told(question, make_record(), make_record(label="ddp"))) <= 6, question


def test_a_cause_and_a_run_set_apart_make_no_seventh_sentence() -> None:
    wrong = make_record(label="zero1", steps=make_steps(norms=(4.0, 3.0, 2.5, 2.0)))
    apart = make_record(label="fsdp", initial_weights=make_weights("d" * 64))
    lines = told("all", make_record(), make_record(label="ddp"), wrong, apart)
    assert len(lines) == 6
    assert "not comparable: fsdp on 2 ranks ran a different job" in lines[-2]


def test_each_question_is_answered_first_and_no_other_is() -> None:
    records = [make_record(), *repeats("ddp", 0.5), *repeats("fsdp", 0.6)]
    begins: dict[ReportFocus, str] = {
        "speed": "Speed on 2 ranks",
        "memory": "Every configuration holds",
        "all": "Every configuration holds",
    }
    for question, begin in begins.items():
        assert told(question, *records)[0].startswith(begin), question
    unasked: tuple[ReportFocus, ...] = ("memory", "parity")
    for question in unasked:
        text = " ".join(told(question, *records))
        assert not any(words in text for words in ("tokens/s", "fastest", " ms", "traffic")), question


def test_a_report_on_parity_opens_with_the_cause_by_which_a_run_left_the_reference() -> None:
    clipped = make_effective(gradient_clipping=None)
    other = make_record(label="ddp")
    other = other.model_copy(update={"backend": other.backend.model_copy(update={"effective": clipped})})
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    summed = make_record(label="zero1", steps=doubled, final_weights=make_weights("c" * 64))
    records = [make_record(), other, summed]
    causes = [s.id for s in statements(Comparison(records).findings) if s.role == "cause"]
    assert causes.index("gradient-scale") > 0
    assert told("parity", *records)[0].startswith("zero1 on 2 ranks: all gradients x 2")


def test_where_nothing_was_judged_no_agreement_is_claimed() -> None:
    lines = told("all", make_record(label="ddp"))
    assert "No warnings, but no run could be compared with a reference." in lines
    assert "No warnings." not in lines


def test_nothing_measured_is_not_called_a_result() -> None:
    failed = make_record(label="ddp", status="failed", steps=[], ranks=[], comm=[], windows=None)
    lines = told("speed", failed)
    assert NOTHING_RAN in lines
    assert "The only configuration, ddp on 2 ranks, did not complete: failed." in lines
    assert "fastest" not in " ".join(lines)


def test_where_all_diverged_no_speed_is_told() -> None:
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    wrong = make_record(label="zero1", steps=doubled, final_weights=make_weights("c" * 64))
    assert told("speed", make_record(), wrong)[0] == NOTHING_TIMED


def test_of_several_jobs_it_is_said_which_the_figures_are_of() -> None:
    other = {"job_id": "b" * 12, "training": {"seed": 2}}
    pairs = [(make_record(**own), make_record(label="ddp", **own)) for own in ({}, other)]
    text = " ".join(told("all", *(record for pair in pairs for record in pair)))
    assert "The figures above are of job 0123456789ab, one of 2 jobs; the results show all." in text
    assert "Figures above" not in " ".join(told("all", *pairs[0]))


def test_a_report_on_weak_scaling_tells_neither_strong_scaling_nor_an_alarm_about_jobs() -> None:
    records = [growing(label, size, 0.5) for label in ("ddp", "fsdp") for size in (1, 2)]
    text = " ".join(told("scaling", *records))
    assert text.startswith("Weak scaling, 2 ranks against 1, efficiency: ddp 100 %, fsdp 100 %;")
    assert "trong scaling" not in text
    assert "several-jobs" not in text
    assert "Figures above" not in text


def test_scaling_that_did_not_run_is_said_not_to_be_answered() -> None:
    lines = told("scaling", *repeats("ddp", 0.5), *repeats("fsdp", 0.5))
    assert lines[0] == NOT_SCALED


def test_a_verdict_on_parity_names_the_difference_its_cause_and_the_warnings() -> None:
    summed = make_record(
        label="zero1",
        steps=make_steps(norms=[norm * 2 for norm in NORMS]),
        final_weights=make_weights("c" * 64),
    )
    lines = told("parity", make_record(), make_record(label="ddp"), summed)
    assert "all gradients x 2" in lines[0]
    assert lines[1].startswith("Cause: ")
    assert "gradient-scale" in lines[-1]
