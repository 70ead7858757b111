"""What is computed once for a record."""

from harness.compare.once import once
from harness.record import Record
from tests.records import make_record, make_steps


def test_it_is_computed_once_for_each_record_and_forgotten_with_it() -> None:
    asked = []

    @once
    def steps(record: Record) -> int:
        asked.append(record.run_id)
        return len(record.steps)

    first, second = make_record(run_id="a"), make_record(run_id="b")
    assert [steps(first), steps(second), steps(first)] == [4, 4, 4]
    assert asked == ["a", "b"]
    del first
    # A new record may lie where the old one lay.
    assert steps(make_record(run_id="c", steps=make_steps((1.0,), (1.0,)))) == 1


def test_a_changed_copy_is_another_record() -> None:
    steps = once(lambda record: len(record.steps))
    record = make_record()
    assert steps(record) == 4
    assert steps(record.model_copy(update={"steps": []})) == 0
