"""Which steps of a run are measured how."""

from itertools import groupby

import pytest

from harness.job.experiment import MeasureSection


def windows(steps: int, **settings: int) -> list[tuple[str, int]]:
    """The windows of a run in order, each with its number of steps."""
    measure = MeasureSection(**settings)
    return [(name, len(list(part))) for name, part in groupby(measure.window(n, steps) for n in range(steps))]


def test_cooldown_steps_follow_the_probes_before_any_is_timed() -> None:
    assert windows(20) == [
        ("warmup", 3), ("probed", 2), ("traced", 1), ("cooldown", 3), ("timed", 11),
    ]  # fmt: skip


@pytest.mark.parametrize(("steps", "last"), [(17, ("timed", 8)), (16, ("timed", 10)), (8, ("timed", 2))])
def test_a_short_run_times_every_step_without_a_probe(steps: int, last: tuple[str, int]) -> None:
    assert windows(steps)[-1] == last


def test_without_probes_there_is_no_cooldown() -> None:
    assert windows(20, probed_steps=0, traced_steps=0) == [("warmup", 3), ("timed", 17)]


def test_a_run_of_losses_alone_times_and_probes_nothing() -> None:
    alone = MeasureSection(checkpoint=True, trace=True, warmup_steps=5, weight_digests=False).losses_alone()
    assert {alone.window(step, 20) for step in range(20)} == {"warmup"}
    looked_at = (alone.probed_steps, alone.traced_steps, alone.trace)
    assert not any(looked_at)
    assert alone.checkpoint == "none"
    assert not alone.weight_digests


def test_the_cooldown_can_be_left_out() -> None:
    assert windows(20, cooldown_steps=0)[-1] == ("timed", 14)


def test_a_traced_step_more_that_is_discarded_leaves_as_many_that_count() -> None:
    measure = MeasureSection()
    found = [measure.window(step, 20, discarded=1) for step in range(20)]
    assert (found.count("traced"), found.count("timed")) == (2, 10)
    untraced = MeasureSection(traced_steps=0)
    assert "traced" not in [untraced.window(step, 20, discarded=1) for step in range(20)]
