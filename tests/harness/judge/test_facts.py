"""The table of metrics: each figure has one entry, from which its places follow."""

import json
from dataclasses import replace

import pytest

from harness.errors import HarnessError
from harness.exported.tracking import scalars
from harness.judge import facts, rows
from harness.judge.agreement.parity import Judgement
from harness.judge.changes import changes, parse_conditions
from harness.judge.comparison import Comparison
from harness.judge.facts import METRICS, Metric, metrics_in, of_ranks
from harness.judge.facts import facts as facts_of
from harness.judge.quantities import Run
from harness.run_directory.assemble import rank_part
from harness.run_directory.events import MeasuredEvent
from harness.tell import tables
from harness.tell.before_after import before_after, failures
from harness.tell.tables import results_table
from harness.tell.terminal import terminal_table
from tests.harness.run_directory.test_assemble import rank
from tests.records import make_record, make_steps
from tests.volumes import make_volume_record

SHOWN_TO_PEOPLE = [
    "tokens_per_second", "step_seconds", "peak_bytes", "model_state_bytes", "sent_bytes_per_step",
    "expected_sent_bytes_per_step", "textbook_sent_bytes_per_step", "max_loss_difference",
    "max_grad_norm_difference",
]  # fmt: skip
LONGEST = Metric(
    key="longest_step_seconds",
    title="longest step ms",
    unit="seconds",
    read=lambda run, _: max(run.step_seconds, default=None),
    aggregate=max,
)


def side(seconds: float) -> Comparison:
    steps = make_steps(seconds=seconds)
    return Comparison([make_record(steps=steps), make_record(label="ddp", steps=steps)])


@pytest.fixture
def with_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One metric more than the harness has, in every module that took the table by name."""
    everything = (*METRICS, LONGEST)
    for module in (facts, rows):
        monkeypatch.setattr(module, "METRICS", everything)
    for module in (tables, rows):
        monkeypatch.setattr(module, "BY_KEY", {metric.key: metric for metric in everything})
    monkeypatch.setattr(tables, "RESULTS", metrics_in("results", "data"))


def test_each_key_stands_once_and_what_follows_another_metric_names_one() -> None:
    keys = [metric.key for metric in METRICS]
    assert len(keys) == len(set(keys))
    assert {metric.follows for metric in METRICS if metric.follows} <= set(keys)


def test_the_main_table_shows_people_these_figures_only() -> None:
    assert [metric.key for metric in metrics_in("results")] == SHOWN_TO_PEOPLE


@pytest.mark.usefixtures("with_longest")
def test_an_entry_in_the_table_is_all_that_a_metric_needs() -> None:
    before, after = side(0.5), side(0.75)
    key = LONGEST.key
    assert [row[key] for row in json.loads(json.dumps(after.as_json()))["rows"]] == [0.75, 0.75]
    assert dict(scalars(after.rows[1]))[3][f"run/{key}"] == 0.75
    (change,) = [c for c in changes(before, after) if c.key == key and c.cell.label == "ddp"]
    assert (change.before, change.after, change.is_worse) == (0.5, 0.75, True)
    assert any(key in line for line in failures(parse_conditions(f"{key}>+40%"), before_after(before, after)))
    table = results_table(after)
    assert table.values()[1][[column.key for column in table.columns].index(key)] == 0.75
    assert LONGEST.title not in terminal_table(after, wide=True)


def test_a_metric_that_is_not_compared_is_no_condition() -> None:
    with pytest.raises(HarnessError, match="expected_sent_bytes_per_step"):
        parse_conditions("expected_sent_bytes_per_step>+5%")


def test_which_direction_is_worse_follows_from_the_metric() -> None:
    worse = {c.key: c.is_worse for c in changes(side(0.5), side(0.75)) if c.cell.label == "ddp"}
    assert (worse["tokens_per_second"], worse["step_seconds"]) == (True, True)
    better = {c.key: c.is_worse for c in changes(side(0.75), side(0.5)) if c.cell.label == "ddp"}
    assert (better["tokens_per_second"], better["step_seconds"]) == (False, False)
    assert worse["max_loss_difference"] is None


def test_what_a_probe_writes_is_in_the_record_and_in_the_table_of_facts() -> None:
    events = rank((0.1, 0.1))
    assert events.setup is not None
    written = MeasuredEvent(memory=[], communication=[], figures={"stalls": 3.0})
    events = replace(events, measured=written)
    events.steps[1] = events.steps[1].model_copy(update={"figures": {"stall_seconds": 0.5}})
    part = rank_part(0, events)
    assert part is not None
    record = make_record(ranks=[part])
    assert part.step_figures == {"stall_seconds": [None, 0.5]}
    assert of_ranks("stalls")(Run.of(record), Judgement(parity="exact")) == 3.0
    found = [fact for fact in facts_of(record) if fact.subject in ("stalls", "stall_seconds")]
    assert [(fact.value, fact.step) for fact in found] == [(3.0, None), (None, 0), (0.5, 1)]


def test_measured_and_expected_bytes_stand_side_by_side() -> None:
    values = {
        fact.source: fact.value
        for fact in facts_of(make_volume_record("ddp"))
        if fact.quantity == "payload_bytes" and fact.rank in (0, None) and "backward" in fact.subject
    }
    assert values["measured"] == values["expected"]
