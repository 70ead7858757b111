import pytest

from harness.judge.quantities import DATA, WAITING, WHOLE, Run, timings
from harness.record import Record
from tests.pipelines import make_pipeline
from tests.records import make_record


def _with_ranks(record: Record, **changes: object) -> Record:
    ranks = [rank.model_copy(update=changes) for rank in record.ranks]
    return record.model_copy(update={"ranks": ranks})


def test_arrays_hold_the_timed_steps_of_each_rank() -> None:
    record = make_record(label="ddp")
    found = timings(record)
    assert found is not None
    timed = [step.step for step in record.steps if step.window == "timed"]
    assert found.steps.tolist() == [[rank.step_seconds[step] for step in timed] for rank in record.ranks]
    assert found.data.tolist() == [[rank.data_seconds[step] for step in timed] for rank in record.ranks]


def test_phases_are_added_up_only_where_every_rank_timed_all() -> None:
    record = make_record(label="ddp")
    steps = len(record.steps)
    phases = {"forward": [0.2] * steps, "backward": [0.3] * steps, "step": [0.1] * steps}
    whole = timings(_with_ranks(record, phase_seconds=phases))
    assert whole is not None
    assert whole.phases is not None
    assert whole.phases == pytest.approx(0.6)
    del phases["step"]
    part = timings(_with_ranks(record, phase_seconds=phases))
    assert part is not None
    assert part.phases is None
    assert part.medians["backward"] == pytest.approx([0.3] * len(record.ranks))


def test_what_a_pipeline_waits_is_part_of_its_step() -> None:
    found = timings(make_pipeline())
    assert found is not None
    assert found.phases is not None
    assert found.phases == pytest.approx(4.1)
    assert found.medians[WAITING] == [1.0, 2.0]


def test_a_rank_that_died_ends_the_comparison_of_ranks_where_it_did() -> None:
    record = make_record(label="ddp")
    shorter = record.ranks[-1].model_copy(update={"step_seconds": record.ranks[-1].step_seconds[:-1]})
    whole = timings(record)
    cut = timings(record.model_copy(update={"ranks": [*record.ranks[:-1], shorter]}))
    assert whole is not None
    assert cut is not None
    assert cut.steps.shape == (whole.steps.shape[0], whole.steps.shape[1] - 1)


@pytest.mark.parametrize("changes", [{"ranks": []}, {"steps": []}])
def test_without_ranks_or_steps_there_are_none(changes: dict[str, object]) -> None:
    record = make_record(label="ddp").model_copy(update=changes)
    assert timings(record) is None
    assert Run.of(record).rank_medians(WHOLE) == []
    assert Run.of(record).largest_median(DATA) is None
