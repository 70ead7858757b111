from pathlib import Path

from harness.compare.comparison import Comparison
from harness.compare.findings.groups import statements
from harness.record import ErrorPart, Record
from harness.record_files import ARCHIVE_NAME
from harness.report.document import Document, Items
from harness.report.sections.verdict import sentences, verdict_section
from harness.report.writers.markdown import render_markdown
from harness.store import read_runs
from tests.records import NORMS, make_communication, make_effective, make_record, make_steps, make_weights

REPORTS = Path(__file__).resolve().parents[4] / "reports"


def verdict(*records: Record) -> str:
    return " ".join(told(*records))


def told(*records: Record) -> list[str]:
    comparison = Comparison(records)
    return sentences(comparison, comparison.findings)


def repeats(label: str, *seconds: float) -> list[Record]:
    return [
        make_record(label=label, repeat=n, run_id=f"{label}-{n}", steps=make_steps(seconds=s))
        for n, s in enumerate(seconds)
    ]


def test_three_to_six_sentences() -> None:
    assert 3 <= len(told(make_record(), make_record(label="ddp"))) <= 6


def test_a_cause_and_a_run_set_apart_make_no_seventh_sentence() -> None:
    wrong = make_record(label="zero1", steps=make_steps(norms=(4.0, 3.0, 2.5, 2.0)))
    apart = make_record(label="fsdp", initial_weights=make_weights("d" * 64))
    (block,) = verdict_section(Comparison([make_record(), make_record(label="ddp"), wrong, apart])).blocks
    assert isinstance(block, Items)
    assert len(block.items) == 6
    assert "succeeded; excluded: fsdp on 2 ranks ran a different job" in block.items[0]
    assert "; first cause: " in block.items[-1]


def test_a_reference_that_failed_alone_has_three_sentences() -> None:
    failed = make_record(status="failed", steps=[], ranks=[], comm=[], windows=None)
    lines = told(failed)
    assert len(lines) == 3
    assert "there is no speed to compare" in lines[1]


def test_of_several_causes_that_by_which_a_run_left_the_reference_is_told() -> None:
    clipped = make_effective(gradient_clipping=None)
    other = make_record(label="ddp")
    other = other.model_copy(update={"backend": other.backend.model_copy(update={"effective": clipped})})
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    summed = make_record(label="zero1", steps=doubled, final_weights=make_weights("c" * 64))
    comparison = Comparison([make_record(), other, summed])
    causes = [s.id for s in statements(comparison.findings) if s.role == "cause"]
    assert causes.index("gradient-scale") > 0
    assert (
        "first cause: zero1 on 2 ranks: all gradients x 2" in sentences(comparison, comparison.findings)[-1]
    )


def test_ranks_that_take_turns_on_cores_are_said_where_speed_is() -> None:
    text = verdict(make_record(), *(make_record(label=label, world_size=16) for label in ("ddp", "fsdp")))
    assert "ranks share processor cores" in text
    assert "share processor" not in verdict(
        make_record(), make_record(label="ddp"), make_record(label="fsdp")
    )


def test_the_reference_does_not_make_one_rank_the_place_to_compare() -> None:
    alone = [make_record(label=label, world_size=1) for label in ("ddp", "fsdp")]
    two = [make_record(label=label) for label in ("ddp", "fsdp")]
    assert "On 2 ranks the medians of the 2 cells" in verdict(make_record(), *alone, *two)


def test_ranks_with_cores_of_their_own_are_compared_before_those_that_take_turns() -> None:
    wide = [make_record(label=label, world_size=16) for label in ("ddp", "fsdp", "zero1")]
    two = [make_record(label=label) for label in ("ddp", "fsdp")]
    assert "On 2 ranks the medians of the 2 cells" in verdict(make_record(), *wide, *two)


def test_where_nothing_was_judged_no_agreement_is_claimed() -> None:
    text = verdict(make_record(label="ddp"))
    assert "No warnings, but no run could be compared with a reference." in text
    assert "No warnings." not in text


def test_only_the_cell_that_stayed_with_the_reference_is_not_the_only_timed_one() -> None:
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    wrong = make_record(label="zero1", steps=doubled, final_weights=make_weights("c" * 64))
    text = verdict(make_record(), make_record(label="ddp"), wrong)
    assert "On 2 ranks only ddp among the cells that did not diverge was timed" in text


def test_cells_that_did_not_fit_are_named() -> None:
    error = ErrorPart(kind="OutOfMemoryError", message="no memory", rank=0)
    text = verdict(make_record(), make_record(label="ddp", status="oom", error=error, steps=[], ranks=[]))
    assert "cells (backend and number of ranks) succeeded, 1 ran out of memory (ddp on 2 ranks)." in text


def test_fastest_is_named_with_its_rival_in_the_noise() -> None:
    text = verdict(
        *repeats("ddp", 0.5, 0.5, 0.51, 0.52, 0.52),
        *repeats("fsdp", 0.505, 0.505, 0.515, 0.525, 0.525),
        *repeats("zero3", 1.0, 1.0, 1.1, 1.2, 1.2),
    )
    assert "On 2 ranks ddp has the highest median throughput: 2,008 tokens/s" in text
    assert "zero3 slowest at 46 % of ddp" in text
    assert "fsdp is statistically tied with the fastest" in text


def test_cells_of_nearly_one_speed_have_no_slowest() -> None:
    text = verdict(*repeats("ddp", 0.5), *repeats("fsdp", 0.501), *repeats("zero3", 0.504))
    assert "the medians of the 3 cells are 2,032 to 2,048 tokens/s" in text
    assert "slowest" not in text
    assert "fastest" not in text


def test_cells_that_are_all_tied_have_no_fastest() -> None:
    slower = [0.505, 0.505, 0.515, 0.525]
    text = verdict(*repeats("ddp", 0.5, 0.5, 0.51, 0.52), *repeats("fsdp", *slower))
    assert "On 2 ranks all 2 cells are statistically tied at medians of 2,008 to 2,028 tokens/s" in text
    assert "fastest" not in text


def test_those_that_runs_do_not_tell_from_the_slowest_are_named_with_it() -> None:
    text = verdict(
        *repeats("ddp", 0.5, 0.5, 0.51, 0.52, 0.52),
        *repeats("fsdp", 0.99, 1.0, 1.08, 1.19, 1.2),
        *repeats("zero3", 1.0, 1.0, 1.1, 1.2, 1.2),
    )
    assert ", zero3 lowest at 46 % of ddp, statistically tied with fsdp" in text


def test_backends_that_are_wrong_on_purpose_are_named_as_such() -> None:
    assert "wrong on purpose" not in verdict(make_record(), make_record(label="ddp"))
    text = verdict(make_record(), make_record(label="planted-wrong-beta2"))
    assert "planted-wrong-beta2: wrong on purpose." in text


def test_a_reference_with_other_threads_says_so() -> None:
    alone = make_record(steps=make_steps(seconds=0.25))
    alone = alone.model_copy(update={"world": alone.world.model_copy(update={"threads_per_rank": 2})})
    text = verdict(alone, *repeats("ddp", 0.5), *repeats("fsdp", 0.9))
    assert "the reference, one process with 2 threads (ranks use 1), reaches 4,096 tokens/s" in text


def test_what_a_transport_sends_that_emulates_a_collective_is_told() -> None:
    scattered = make_communication(2, op="reduce_scatter", payload_bytes=4_000_000)
    text = verdict(make_record(), make_record(label="ddp"), make_record(label="fsdp", comm=scattered))
    assert "traffic per rank and step (ring algorithm) is 0" in text
    assert "; gloo implements reduce-scatter as all-reduce and sends up to 4.00 MB." in text
    assert "implements" not in verdict(make_record(), make_record(label="ddp"))


def test_single_runs_say_that_noise_was_not_measured() -> None:
    text = verdict(*repeats("ddp", 0.5), *repeats("fsdp", 0.9))
    assert "; too few runs to rank 2 cells: each needs 4" in text
    assert "fastest" not in text


def test_apart_from_noise_is_said() -> None:
    text = verdict(*repeats("ddp", 0.5, 0.51, 0.51, 0.52), *repeats("zero3", 1.0, 1.1, 1.1, 1.2))
    assert "(range of 4 runs 1,969 to 2,048)" in text
    assert "On 2 ranks ddp is fastest: 2,008 tokens/s" in text
    assert "tied" not in text


def test_diverged_cell_is_named() -> None:
    wrong = make_record(label="zero1", steps=make_steps(norms=(4.0, 3.0, 2.5, 2.0)))
    text = verdict(make_record(), make_record(label="ddp"), wrong)
    assert "1 of 2 judged cells match the reference in loss, gradient norm and weights" in text
    assert " (losses bit for bit); zero1 on 2 ranks diverges." in text
    assert "the medians of the 2 cells among the cells that did not diverge are" in verdict(
        make_record(), make_record(label="ddp"), make_record(label="fsdp"), wrong
    )


def test_the_speed_of_one_process_is_told_beside_that_of_several() -> None:
    alone = make_record(steps=make_steps(seconds=0.25))
    text = verdict(alone, *repeats("ddp", 0.5), *repeats("fsdp", 0.9))
    assert "; the reference, one process, reaches 4,096 tokens/s." in text


def test_runs_of_few_timed_steps_say_little() -> None:
    assert "; with only 2 timed steps per run, speeds are rough" in verdict(
        *repeats("ddp", 0.5), *repeats("fsdp", 0.9)
    )


def test_a_byte_too_many_is_not_as_expected() -> None:
    """On published runs of two ranks, where a ring sends what is paid in: 16 bytes more in every step."""
    records = [record for _, record in read_runs([REPORTS / "default" / ARCHIVE_NAME])[0]]
    alone, ddp = (next(r for r in records if r.backend.label == label) for label in ("single", "ddp"))
    assert "; as expected to the byte." in verdict(alone, ddp)
    probed = ddp.windows.probed if ddp.windows else 0
    comm = [
        row.model_copy(update={"payload_bytes": row.payload_bytes + 16 * probed * (row.phase == "backward")})
        for row in ddp.comm
    ]
    text = verdict(alone, ddp.model_copy(update={"comm": comm}))
    assert "; not what the closed form expects: ddp (+16 bytes)." in text


def test_nothing_measured_is_not_called_a_result() -> None:
    failed = make_record(label="ddp", status="failed", steps=[], ranks=[], comm=[], windows=None)
    text = verdict(failed)
    assert "The only cell, ddp on 2 ranks, did not succeed: failed." in text
    assert "fastest" not in text
    assert "No loss could be compared" in text


def test_each_job_has_its_own_verdict() -> None:
    section = verdict_section(Comparison([make_record(), make_record(job_id="b" * 12)]))
    text = render_markdown(Document("t", [section]), {}, "")
    assert "**Job 0123456789ab**" in text
    assert "**Job bbbbbbbbbbbb**" in text


def test_cells_without_a_closed_form_are_counted_and_not_as_expected() -> None:
    own = make_record(label="ddp")
    part = own.backend.model_copy(update={"label": "own", "name": "own"})
    text = verdict(own, own.model_copy(update={"backend": part, "run_id": "own"}))
    assert "as expected" not in text
    assert "without a closed form: " in text


def test_cells_that_were_measured_otherwise_are_not_called_alone() -> None:
    other = make_record(label="fsdp")
    other = other.model_copy(update={"world": other.world.model_copy(update={"micro_batch_size": 1})})
    assert "On 2 ranks no two cells were measured under the same conditions" in verdict(
        make_record(), make_record(label="ddp"), other
    )
