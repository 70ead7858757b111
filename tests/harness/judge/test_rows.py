"""A run is held to the reference with its split where the loss hangs on the split."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from harness.forms.layout import Layout, Tensor
from harness.job.experiment import ReportFocus
from harness.judge.agreement.job_equivalence import PER_STEP
from harness.judge.agreement.parity import is_variant
from harness.judge.comparison import Comparison
from harness.judge.quantities import expected_states, volume_differences, why_unknown
from harness.judge.rows import JudgedRun, reason
from harness.judge.statistics import Ranking
from harness.record import ErrorPart, ObservedPart, Record, ResumedPart, SplitPart
from harness.tell.first_page import same_training, short_document, summary_section
from harness.tell.report import details_document
from harness.tell.tables import parity_cell
from harness.tell.terminal import terminal_table
from harness.tell.writers.text import render_details, render_markdown
from tests.harness.tell.cells import markdown_of, page_of, repeats
from tests.records import LOSSES, changed, make_ranks, make_record, make_steps, make_weights, published

ROW_KEYS = {
    "backend", "world_size", "repeat", "job_id", "status", "reason", "run_id", "tokens_per_second",
    "samples_per_second", "evaluation_samples_per_second", "step_seconds", "own_step_seconds", "peak_bytes",
    "model_state_bytes", "expected_model_state_bytes",
    "sent_bytes_per_step", "expected_sent_bytes_per_step", "textbook_sent_bytes_per_step",
    "transport_sent_bytes_per_step", "final_loss", "max_loss_difference", "max_grad_norm_difference",
    "final_weights_difference", "update_difference", "first_divergent_step", "host_peak_bytes",
    "predicted_peak_bytes", "reserved_bytes", "parity",
    "parity_reason", "not_judged",
}  # fmt: skip
COMPARED_KEYS = ROW_KEYS | {
    "speed_base", "speed_ratio", "speed_ratio_low", "speed_ratio_high", "speed_order", "parity_run"
}  # fmt: skip
"""Of the cell, in the document."""


def test_document_is_json_and_has_every_key_whatever_the_run_gave() -> None:
    failed = make_record(label="ddp", status="failed", steps=[], ranks=[], windows=None)
    assert [set(row.as_json()) for row in Comparison([make_record(), failed]).rows] == [ROW_KEYS] * 2
    document = Comparison([make_record(), make_record(label="ddp")]).as_json()
    assert json.loads(json.dumps(document)) == document
    assert set(document) == {
        "job_id", "job_ids", "rows", "not_comparable", "noise", "repeat_spreads", "settings", "findings",
    }  # fmt: skip
    assert all(set(row) == COMPARED_KEYS for row in document["rows"])
    assert document["job_id"] == "0123456789ab"
    assert [row["parity"] for row in document["rows"]] == ["exact", "exact"]
    several = Comparison([make_record(), make_record(job_id="b" * 12)]).as_json()
    assert (several["job_id"], several["job_ids"]) == (None, ["0123456789ab", "b" * 12])


def test_each_run_is_judged_by_the_reference_of_its_own_job_that_worked() -> None:
    second = {"job_id": "b" * 12, "steps": make_steps([loss + 1 for loss in LOSSES])}
    first = [make_record(status="failed"), make_record(), make_record(label="ddp")]
    comparison = Comparison([make_record(label="ddp", **second), *first, make_record(**second)])
    assert [row.judgement.parity for row in comparison.rows if row.record.status == "ok"] == ["exact"] * 4


def test_a_reference_with_words_in_brackets_is_still_the_reference() -> None:
    newer = make_record(run_id="newer", environment={"python": "3.13.0"})
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
        ("failed", [], ERROR | {"message": "first\nsecond", "rank": 3}, "ValueError (rank 3): first"),
        ("failed", [], {"kind": "KeyError", "message": ""}, "KeyError: no message"),
        (
            "failed", [], ERROR | {"step": 3, "phase": "backward"},
            "ValueError (rank 1, step 3, backward): odd",
        ),
        ("failed", [], ERROR | {"phase": "setup"}, "ValueError (rank 1, setup): odd"),
        ("unsupported", ["too old", "no GPU"], None, "too old; no GPU"),
    ],
)  # fmt: skip
def test_a_reason_names_error_rank_step_and_phase(
    status: str, reasons: list[str], error: dict[str, Any] | None, told: str | None
) -> None:
    part = ErrorPart(**error) if error else None
    assert reason(make_record(status=status, reasons=reasons, error=part)) == told


DEPENDS = SplitPart(difference=0.3, repetition=0.0, rounding=1e-5)
RANDOM = SplitPart(difference=0.3, repetition=0.2, rounding=1e-5)
COUNTS = SplitPart(difference=0.3, repetition=0.2, rounding=1e-5, by_samples=1e-9)
ADDS_UP = SplitPart(difference=2e-7, repetition=0.0, rounding=1e-5)
CUT, EXACT = "single:micro_batch_size=4", "single:micro_batch_size=4,precision=fp64"
HALF = 0.5
"""What the split changes of each loss."""


def of_reference(label: str, losses: Sequence[float], samples: int, **changes: Any) -> Record:
    world = {"micro_batch_size": samples, "accumulation_steps": 8 // samples}
    return make_record(label=label, steps=make_steps(losses), run_id=f"run-{label}", world=world, **changes)


def row_of(split: SplitPart, losses: Sequence[float], cuts: Sequence[str] = (CUT, EXACT)) -> JudgedRun:
    return comparison_of(split, losses, cuts).rows[-1]


def comparison_of(
    split: SplitPart, losses: Sequence[float], cuts: Sequence[str] = (CUT, EXACT), **changes: Any
) -> Comparison:
    halves = [loss - HALF for loss in LOSSES]
    records = [of_reference("single", LOSSES, 8, split=split)]
    records += [of_reference(label, halves, 4) for label in cuts]
    ends = {"final_weights": make_weights("c" * 64)}
    return Comparison(
        [*records, make_record(label="ddp", **({"steps": make_steps(losses)} | ends | changes))]
    )


def test_a_run_is_held_to_the_reference_with_its_split_whose_difference_is_no_noise() -> None:
    row = row_of(DEPENDS, [loss - HALF for loss in LOSSES])
    assert (row.reference.record.backend.label, row.judgement.parity) == (CUT, "tight")
    wrong = comparison_of(DEPENDS, [loss - HALF + 1e-3 for loss in LOSSES])
    assert wrong.rows[-1].judgement.parity == "diverged"
    assert not [f for f in wrong.findings if f.id == "loss-depends-on-split"]
    assert row.noise.tight.loss < 1e-4
    assert [level.repetitions for level in row.noise.levels] == [(EXACT,)]


def test_the_first_step_that_tells_two_splits_apart_shows_which_a_run_took() -> None:
    own = [LOSSES[0], *(loss - HALF for loss in LOSSES[1:])]  # values of a batch decide what runs
    cuts = [of_reference(label, [own[0] + 1e-8, *own[1:]], 4) for label in (CUT, EXACT)]
    whole = of_reference("single", LOSSES, 8, split=DEPENDS)
    row = Comparison([whole, *cuts, make_record(label="ddp", steps=make_steps(own))]).rows[-1]
    assert (row.reference.record.backend.label, row.judgement.parity) == (CUT, "tight")


@pytest.mark.parametrize(("shift", "at_once"), [(HALF, 4), (0.0, None)])
def test_a_run_judged_by_the_ranks_split_says_so(shift: float, at_once: int | None) -> None:
    """Nothing is said of a loss over all ranks, such as one that reduces a count."""
    rows = comparison_of(DEPENDS, [loss - shift for loss in LOSSES])
    (group,) = (group for group in rows.groups if group.label == "ddp")
    found = [f for f in rows.findings if f.id == "loss-depends-on-split"]
    assert (group.parity, group.at_once) == ("tight", at_once)
    assert getattr(parity_cell(group), "text", "tight") == ("tight" if at_once is None else "tight*")
    same = same_training(rows)
    if at_once is None:
        assert not found
        assert "*:" not in terminal_table(rows)
        assert same.startswith("yes: 1 of 1")
    else:
        assert found[0].text.startswith(
            "trains as one process that takes 4 samples at once, not as one that takes all 8: loss of step 0 "
        )
        assert found[0].values["whole_batch_loss"] - found[0].values["loss"] == HALF
        assert same.startswith(
            "yes, as one process that takes 4 samples at once, not as one on the whole batch"
        )
        section = summary_section(rows, "all")
        assert section is not None
        for told in (" ".join(terminal_table(rows).split()), section.blocks[-1].text):
            assert (
                "tight: as close as another order of summation. *: as one process that takes 4 samples"
                in told
            )


def test_a_run_that_continues_a_checkpoint_is_held_to_its_own_steps_of_the_whole_batch() -> None:
    steps = make_steps([loss - HALF for loss in LOSSES])[2:]
    ranks = [
        part.model_copy(update={name: getattr(part, name)[2:] for name in PER_STEP}) for part in make_ranks(2)
    ]
    resumed = ResumedPart(run_id="run", backend="ddp", world_size=2, step=2, format="neutral")
    rows = comparison_of(DEPENDS, LOSSES, steps=steps, ranks=ranks, resumed=resumed)
    (finding,) = (f for f in rows.findings if f.id == "loss-depends-on-split")
    assert (finding.values["step"], finding.values["whole_batch_loss"]) == (2, LOSSES[2])


def test_the_limit_of_losses_on_a_grid_is_the_one_that_judged_them() -> None:
    training = {"precision": "bf16-mixed"}
    exact, given = [20.06, 20.31, 19.44, 18.94], [20.0, 20.5, 19.5, 19.0]
    ranks = make_ranks(
        2, computed_loss_sums=[[508 * loss for loss in given]] * 2, target_tokens=[[508] * 4] * 2
    )
    rows = Comparison([
        *(make_record(label=f"single{how}", training=training, run_id=f"run-{n}",
                      steps=make_steps([x + n * 1e-3 for x in exact]))
          for n, how in enumerate(("", ":micro_batch_size=4", ":precision=fp32", ":precision=cast"))),
        make_record(label="ddp", training=training, steps=make_steps(given), ranks=ranks),
    ])  # fmt: skip
    (group,) = (group for group in rows.groups if group.label == "ddp")
    assert (group.parity, group.limits and group.limits.loss) == ("band", 3 * 0.125)
    _, text = markdown_of(page_of(rows))
    assert "Losses of ddp on 2 ranks lie on a grid of their precision" in text


def test_without_such_a_reference_it_is_unjudged_and_both_losses_are_said() -> None:
    row = row_of(DEPENDS, [loss - HALF for loss in LOSSES], cuts=())
    assert row.judgement.parity == "unjudged"
    assert row.judgement.reason == (
        "the loss depends on how the batch is split: 4.25 in step 3 with 4 samples at once, 4.75 in step 3 "
        "with 8 samples at once in the reference; no record of single:micro_batch_size=4, which 'compare' "
        "runs for this"
    )


def test_random_parts_are_unjudged_whatever_ran() -> None:
    row = row_of(RANDOM, [loss - HALF for loss in LOSSES])
    assert row.judgement.parity == "unjudged"
    assert "draws random numbers" in str(row.judgement.reason)
    near = row_of(RANDOM, [loss - 1e-6 for loss in LOSSES])
    assert near.judgement.parity == "tight", "a state that each pass changes may matter to no loss"
    # Losses that would read alike are told in full.
    alike = row_of(RANDOM, [*(loss - HALF for loss in LOSSES[:-1]), LOSSES[-1] - 3e-5])
    assert "4.74997 in step 3 with 4 samples at once, 4.75 in step 3" in str(alike.judgement.reason)


def test_where_the_count_of_passes_decides_runs_with_as_many_are_judged() -> None:
    """The whole batch in one pass is such a run's reference, and its repetitions of one pass are noise."""
    repeated = "single:micro_batch_size=8,norm=fp32,backward=reordered"

    def row(losses: Sequence[float], passes: int = 1) -> JudgedRun:
        halves = [loss - HALF for loss in LOSSES]
        records = [of_reference("single", LOSSES, 8, split=COUNTS), of_reference(CUT, halves, 4)]
        records.append(of_reference(repeated, [loss + 1e-6 for loss in LOSSES], 8))
        run = make_record(label="ddp", steps=make_steps(losses), final_weights=make_weights("c" * 64))
        return Comparison([*records, changed(run, world={"accumulation_steps": passes})]).rows[-1]

    sound, faulty = row([loss - 1e-6 for loss in LOSSES]), row([loss - 1e-3 for loss in LOSSES])
    assert sound.judgement.parity == "tight"
    assert (faulty.judgement.parity, faulty.noise.levels[0].repetitions) == ("diverged", (repeated,))
    other = row([loss - 1e-3 for loss in LOSSES], passes=2).judgement
    assert other.parity == "unjudged"
    assert "a state that each pass changes" in str(other.reason)


@pytest.mark.parametrize(
    ("split", "shift", "cuts", "parity"),
    [
        # A loss over all ranks is held to that of the whole batch, as a sum over samples is, whose splits
        # are noise.
        (DEPENDS, 0.0, (CUT, EXACT), "tight"), (ADDS_UP, 1e-4, (), "diverged"),
    ],
)  # fmt: skip
def test_the_whole_batch_is_the_reference_where_the_split_decides_nothing(
    split: SplitPart, shift: float, cuts: Sequence[str], parity: str
) -> None:
    row = row_of(split, [loss + shift for loss in LOSSES], cuts)
    assert (row.judgement.parity, row.reference.record.backend.label) == (parity, "single")


def test_limits_of_each_split_are_told_apart() -> None:
    halves = [loss - HALF for loss in LOSSES]
    records = [of_reference("single", LOSSES, 8, split=DEPENDS), of_reference(CUT, halves, 4)]
    comparison = Comparison([*records, make_record(label="ddp", steps=make_steps(halves))])
    job = records[0].job_id
    assert list(comparison.noises) == [job, f"{job}, 4 at once"]


LAYOUT = Layout(
    parameters=[Tensor(name=name, shape=[2], dtype="float32") for name in "ab"], decaying=[], buffers=[],
    blocks=[], uses=None, without_gradient=[], unreached=None, unit_calls=None, depends_on_data=True,
)  # fmt: skip


def test_where_values_decide_what_runs_bytes_are_not_judged() -> None:
    steps = make_steps(changes={step: {"window": "probed"} for step in range(4)})
    record = make_record(label="fsdp", layout=LAYOUT, steps=steps)
    assert why_unknown(record) == "execution depends on data"
    assert volume_differences(record) == []
    assert expected_states(record, 0) is None
    # A record with counts of the reference still loads.
    assert ObservedPart.model_validate({"counted": {"uses": None}}) == ObservedPart()


FAULT = ErrorPart(rank=1, kind="RuntimeError", message="Connection closed by peer")


def failed(record: Record) -> Record:
    """The same run as it is recorded where it fails in its last step."""
    return changed(record, status="failed", error=FAULT, steps=record.steps[:-1])


def default(label: str, *numbers: int) -> Comparison:
    """The published default comparison, of which some runs of a cell failed."""
    return Comparison(
        failed(r) if r.backend.label == label and r.repeat in numbers else r for r in published("default")
    )


def order_of(comparison: Comparison) -> Ranking:
    return max(comparison.comparable.rankings.values(), key=lambda order: len(order.names))


@pytest.mark.parametrize("label", ["ddp", "zero3"])
def test_the_pairs_of_its_cell_are_judged_by_the_rounds_that_are_left(label: str) -> None:
    before, after = order_of(Comparison(published("default"))), order_of(default(label, 2))
    assert (after.base, set(after.names)) == (before.base, set(before.names))
    for name, ratio in after.to_base.items():
        lost = 1 if label in (name, after.base) else 0
        assert ratio.rounds == before.to_base[name].rounds - lost
        assert ratio.middle == pytest.approx(before.to_base[name].middle, rel=0.05)
    assert after.to_base["zero3"].order == "slower"
    # Where every round of the base failed the next cell is it.
    numbers = {record.repeat for record in published("default")}
    without = order_of(default("ddp", *numbers))
    assert "ddp" not in without.names
    assert without.base in without.names


@pytest.mark.parametrize("question", ["all", "speed"])
def test_a_report_names_the_cell_and_how_many_of_its_runs_failed(question: ReportFocus) -> None:
    comparison = default("zero3", 2)
    runs = len([r for r in published("default") if r.backend.label == "zero3"])
    document = details_document(comparison, question=question)
    of = short_document(comparison, question, document)
    pictures = {picture.key: picture.key for picture in of.pictures()}
    assert of.details is not None
    texts = render_markdown(of, pictures, "", "d"), render_details(of.details, pictures, "r")
    short, details = (text.replace("\\", "") for text in texts)
    assert f"failed in 1 of {runs} runs: zero3 on 2 ranks" in short
    (row,) = (line for line in short.splitlines() if line.startswith("| zero3 ") and "(ok x" in line)
    assert f"(ok x{runs - 1}, failed x1)" in row
    assert f"without a result (failed): 1 of {runs} runs" in details
    assert "Connection closed by peer" in details


def test_a_round_that_diverged_is_not_left_out() -> None:
    """It did other work, so the cell is in no order."""
    good = repeats("fsdp", 0.5, 0.6, 0.5)
    nan = good[1].model_copy(update={"status": "diverged"})
    comparison = Comparison([make_record(), *repeats("ddp", 0.5, 0.5, 0.5), good[0], nan, good[2]])
    assert order_of(comparison).names == ("ddp",)


def test_figures_are_those_of_runs_with_a_result() -> None:
    slow = failed(repeats("fsdp", 0.5, 50.0)[1])
    comparison = Comparison([make_record(), *repeats("fsdp", 0.5), slow])
    group = next(group for group in comparison.groups if group.label == "fsdp")
    assert (group.status, group.parity) == ("ok x1, failed x1", "exact")
    assert group.step_seconds == pytest.approx([0.5] * len(group.step_seconds))
