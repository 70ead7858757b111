from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.judge.changes import Change, changes, parse_conditions, settings, shares_sessions
from harness.judge.comparison import Comparison
from harness.judge.statistics import Ranking, Timed
from harness.tell.before_after import before_after, verdict
from harness.tell.before_after import failures as failures_of
from harness.tell.writers.text import render_markdown
from tests.harness.tell.cells import repeats
from tests.records import (
    ENVIRONMENT,
    make_communication,
    make_effective,
    make_ranks,
    make_record,
    make_weights,
    published,
)

ROOT = Path(__file__).parents[3]


def side(*seconds: float, label: str = "ddp", **changes: object) -> Comparison:
    return Comparison(repeats(label, *seconds, **changes))


def failures(condition: str, before: Comparison, after: Comparison) -> list[str]:
    return failures_of(parse_conditions(condition), before_after(before, after))


def change(before: Comparison, after: Comparison, measure: str) -> Change:
    (found,) = [c for c in changes(before, after) if c.key == measure]
    return found


def test_slower_beyond_and_within_the_spread_of_the_runs() -> None:
    found = change(side(0.50, 0.51, 0.51, 0.52), side(0.60, 0.61, 0.61, 0.62), "step_seconds")
    assert (found.judgement, found.relative) == ("beyond noise", pytest.approx(0.1 / 0.51))
    found = change(side(0.50, 0.55, 0.60, 0.60), side(0.52, 0.57, 0.62, 0.62), "step_seconds")
    assert found.judgement == "within noise"


def test_single_runs_are_not_judged_in_time_but_in_counts() -> None:
    more = side(0.6, comm=make_communication(2, payload_bytes=5000), ranks=make_ranks(2, 20_000))
    assert change(side(0.5), more, "step_seconds").judgement == "not judged"
    assert change(side(0.5), more, "sent_bytes_per_step").judgement == "beyond noise"
    assert change(side(0.5), more, "model_state_bytes").judgement == "beyond noise"


def test_equal_figures_are_equal() -> None:
    assert {c.judgement for c in changes(side(0.5), side(0.5))} <= {"equal", "n/a"}


@pytest.mark.parametrize(("by", "judgement"), [(1e-7, "within noise"), (1e-3, "beyond noise")])
def test_losses_that_a_version_changes_in_every_cell_change(by: float, judgement: str) -> None:
    """The reference too: each cell is as near to that of its own side as before."""
    before = [r for r in published("default") if r.repeat == 0 and r.backend.label in ("single", "ddp")]
    after = [r.model_copy(update={"steps": [replace(s, loss=s.loss + by) for s in r.steps]}) for r in before]
    found = changes(Comparison(before), Comparison(after))
    assert {c.cell.label: c.judgement for c in found if c.key == "final_loss"} == {
        "single": judgement, "ddp": judgement,
    }  # fmt: skip
    assert {c.judgement for c in found if c.key != "final_loss"} <= {"equal", "n/a", "within noise"}


def test_losses_that_differ_between_repeats_are_tested_as_times_are() -> None:
    def moved(*by: float) -> Comparison:
        runs = [
            r for r in published("default") if r.repeat < len(by) and r.backend.label in ("single", "ddp")
        ]
        steps = {r.run_id: [replace(s, loss=s.loss + by[r.repeat]) for s in r.steps] for r in runs}
        return Comparison([r.model_copy(update={"steps": steps[r.run_id]}) for r in runs])

    found = changes(moved(0.0, 0.1, 0.05), moved(0.01, 0.09, 0.06))
    assert {c.judgement for c in found if c.key == "final_loss"} == {"not judged"}


def test_versions_and_options_that_differ_are_named() -> None:
    packages = {"torch": "2.12.0", "deepspeed": "0.19.8"}
    effective = make_effective(reduce_dtype="bfloat16")
    backend = {"effective": effective, "native_config": {"a": 1}}
    after = side(0.5, environment={"packages": packages}, backend=backend)
    found = {(s.backend, s.field): (s.before, s.after) for s in settings(side(0.5), after)}
    assert found == {
        ("", "environment.packages.torch"): ("2.11.0", "2.12.0"),
        ("ddp, 2", "effective.reduce_dtype"): ("float32", "bfloat16"),
        ("ddp, 2", "native_config.a"): (None, 1),
    }


def test_versions_of_every_run_are_compared() -> None:
    other = ENVIRONMENT | {"packages": {"torch": "2.12.0", "deepspeed": "0.19.8"}}
    before = Comparison.of_rows([*side(0.5).rows, *side(0.5, label="fsdp").rows])
    after = Comparison.of_rows([*side(0.5).rows, *side(0.5, label="fsdp", environment=other).rows])
    (found,) = settings(before, after)
    assert (found.field, found.before) == ("environment.packages.torch", "2.11.0")
    assert found.after == ["2.11.0", "2.12.0"]
    assert settings(after, after) == []


def test_the_number_of_a_job_is_no_setting_that_differs() -> None:
    sides = [
        side(0.5, environment={"variables": {"SLURM_JOB_ID": job, "NCCL_ALGO": algorithm}})
        for job, algorithm in (("17", "Ring"), ("18", "Tree"))
    ]
    assert [s.field for s in settings(*sides)] == ["environment.variables.NCCL_ALGO"]


def test_sides_that_overlap_are_inconclusive_and_still_fail_a_condition() -> None:
    before = side(*(0.50 + 0.01 * n for n in range(7)))
    after = side(*(0.55 + 0.01 * n for n in range(7)))
    assert change(before, after, "step_seconds").judgement == "inconclusive"
    (line,) = failures("step_seconds>+5%", before, after)
    assert line.endswith("but the runs of both sides overlap")


def test_sides_are_compared_within_the_sessions_that_they_share() -> None:
    """Days differ by more than the change, which holds on each of them."""

    def both_days(first: float, second: float) -> Comparison:
        days = [
            row.record.model_copy(update={"created_at": f"2026-01-0{day}T10:00:00+00:00"})
            for day, seconds in ((1, first), (2, second))
            for row in side(seconds, seconds + 0.01, seconds + 0.02).rows
        ]
        return Comparison(days)

    before, after = both_days(0.5, 0.9), both_days(0.6, 1.0)
    assert shares_sessions(before, after)
    assert change(before, after, "step_seconds").judgement == "beyond noise"
    assert change(before, after, "tokens_per_second").judgement == "beyond noise"
    apart = Comparison([row.record for row in after.rows if row.run.session == 1])
    earlier = Comparison([row.record for row in before.rows if row.run.session == 0])
    assert not shares_sessions(earlier, apart)
    assert change(earlier, apart, "step_seconds").judgement == "not judged"


def test_sides_that_ran_in_turns_are_compared_within_rounds() -> None:
    """The published FSDP and DDP of seven rounds, as if FSDP was DDP after a change."""
    found = published("default")
    sides = {name: [r for r in found if r.backend.label == name] for name in ("ddp", "fsdp")}
    after = [r.model_copy(update={"backend": sides["ddp"][0].backend}) for r in sides["fsdp"]]
    before, after = Comparison(sides["ddp"]), Comparison(after)
    (order,) = Comparison([*sides["ddp"], *sides["fsdp"]]).rankings.values()
    alone = {name: {n: Timed(run.value) for n, run in of.items()} for name, of in order.values.items()}
    ratio = Ranking(alone, order.base).to_base["fsdp"]
    assert ratio.extent is not None
    speed, step = (change(before, after, key) for key in ("tokens_per_second", "step_seconds"))
    assert (speed.judgement, step.judgement) == ("beyond noise", "beyond noise")
    assert speed.extent == ratio.extent
    assert speed.relative == ratio.middle - 1
    mirrored = ratio.mirrored.extent
    assert (step.extent.low, step.extent.high) == pytest.approx((mirrored.low, mirrored.high), rel=1e-12)
    (line,) = failures("tokens_per_second<-3%", before, after)
    assert line.startswith("ddp on 2 ranks: tokens_per_second changed by -40.")
    assert "are compared within rounds" in render_markdown(before_after(before, after), {}, "", "")
    whole = Comparison([row.record.model_copy(update={"turns": None}) for row in after.rows])
    assert change(before, whole, "step_seconds").judgement == "inconclusive"
    assert "turns" in {setting.field for setting in settings(before, whole)}


def test_a_published_baseline_of_another_job_is_said_first_and_every_lost_cell_is_named() -> None:
    sides = [Comparison(published(name)) for name in ("default", "bloom-560m")]
    (before,), (after,) = (side.by_job for side in sides)
    first, *told = verdict(before_after(*sides))
    assert first.startswith(f"Not all ran the same job: {before} before, {after} after.")
    lost = [line for line in told if line.startswith("Lost: ")]
    assert len(lost) == 7
    assert "What differs: model.config, " in first
    assert "Lost: accelerate-zero3 on 2 ranks: absent after." in lost
    assert not [line for line in told if "Beyond noise" in line or "Undecided" in line]


def again(of: Comparison, code: str | None = None, **more: Any) -> Comparison:
    """The same runs, with another id of their job."""
    records = [row.record for row in of.rows]
    return Comparison([
        record.model_copy(update={
            "job_id": "f" * 12,
            "environment": record.environment.model_copy(update={"code": code or record.environment.code})
        } | more)
        for record in records
    ])  # fmt: skip


def test_cells_of_another_job_have_no_change_and_fail_every_condition() -> None:
    before, after = side(0.5, 0.51), side(0.9, 0.91)
    other = again(after, code="0" * 12)
    assert {c.judgement for c in changes(before, after)} > {"not judged"}
    assert {(c.judgement, c.relative, c.extent) for c in changes(before, again(after))} == {
        ("another job", None, None)
    }
    # Its initial weights, samples and settings are the same, and another version gives ids.
    assert [c.judgement for c in changes(before, other)] == [c.judgement for c in changes(before, after)]
    first = before.rows[0].record
    longer = first.job.training.model_copy(update={"steps": 99})
    for more in (
        {"job": first.job.model_copy(update={"training": longer})},
        {"initial_weights": first.initial_weights.model_copy(update={"digest": "1" * 64})},
        {"steps": [replace(step, sample_hashes="ab") for step in first.steps]},
        {"steps": []},
    ):
        other = again(after, code="0" * 12, **more)
        assert {c.judgement for c in changes(before, other)} == {"another job"}
    for condition in ("step_seconds>+5%", "step_seconds>+500%"):
        assert failures(condition, before, other) == ["ddp on 2 ranks: another job, so nothing is compared"]


def test_two_conditions_are_read() -> None:
    texts = [str(c) for c in parse_conditions(" peak_bytes > +5% , tokens_per_second<-3%")]
    assert texts == ["peak_bytes>+5%", "tokens_per_second<-3%"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "a condition is a measure"), ("peak_bytes", "a condition is a measure"),
        ("peak_bytes>5", "a condition is a measure"), ("peak_bytes>=5%", "a condition is a measure"),
        ("peak_byte>+5%", "Did you mean 'peak_bytes'"), ("tokens_per_second>-3%", "no change can meet"),
        ("peak_bytes>+5%,", "a condition is a measure"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused(text: str, told: str) -> None:
    with pytest.raises(HarnessError, match=told.replace("?", r"\?")):
        parse_conditions(text)


SLOWER, RISES = "tokens_per_second<-3%", "sent_bytes_per_step>+5%"


@pytest.mark.parametrize(
    ("condition", "before", "after", "lines"),
    [
        (SLOWER, [0.5], [0.6], ["changed by -16.7 %, from 2048 to 1706.67"]),
        ("tokens_per_second<-20%", [0.5], [0.6], []),
        (SLOWER, [0.6], [0.5], []),
        (SLOWER, [0.5, 0.55, 0.6, 0.6], [0.52, 0.58, 0.6, 0.62], []),
        (SLOWER, [0.5, 0.55, 0.6], [0.52, 0.58, 0.62], ["too few runs to tell it from noise"]),
        ("model_state_bytes>+5%", [0.5], {"ranks": make_ranks(2, 32_000)}, ["changed by +100.0 %"]),
        ("peak_bytes>+5%", [0.5], {"ranks": []}, ["ddp on 2 ranks: peak_bytes is n/a now"]),
        ("peak_bytes>+5%", {"ranks": []}, {"ranks": []}, ["could not be checked"]),
        (RISES, {"comm": []}, [0.5], ["was 0"]),
    ],
    ids=["slower", "within", "faster", "noise", "not judged", "more", "lost", "unchecked", "out of nothing"],
)
def test_a_condition_fails_where_it_is_met_or_cannot_be_told(
    condition: str, before: Any, after: Any, lines: list[str]
) -> None:
    sides = [side(*of) if isinstance(of, list) else side(0.5, **of) for of in (before, after)]
    found = failures(condition, *sides)
    assert len(found) == len(lines)
    assert all(text in line for text, line in zip(lines, found, strict=True))


def test_cell_that_was_lost_fails_whatever_the_condition() -> None:
    before = side(0.5)
    assert failures("peak_bytes>+5%", before, side(0.5, status="failed"))[0] == (
        "ddp on 2 ranks: failed after."
    )
    other = Comparison([make_record(label="fsdp")])
    assert failures("peak_bytes>+5%", before, other)[0].endswith("absent after.")


def test_a_cell_that_is_not_the_same_job_any_more_fails() -> None:
    before = Comparison([make_record(), make_record(label="ddp")])
    after = Comparison([make_record(), make_record(label="ddp", initial_weights=make_weights("d" * 64))])
    assert failures("peak_bytes>+5%", before, after) == ["ddp on 2 ranks: not the job of the others after."]
