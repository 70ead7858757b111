"""What is looked at in the first steps: who gets a gradient, and when updates are made."""

from harness.judge.comparison import Comparison
from harness.judge.findings.balance import find as find_idle
from harness.judge.findings.finding import Finding
from harness.judge.findings.timing import find_impossible as find_late
from harness.record import ObservedPart
from tests.records import make_ranks, make_record

IDLE = ["moe.experts.0.up", "moe.experts.0.down", "pooler"]


def idle(*of_ranks: list[list[str]]) -> list[Finding]:
    ranks = [
        part.model_copy(update={"idle_modules": idle})
        for part, idle in zip(make_ranks(2), of_ranks, strict=True)
    ]
    return find_idle(Comparison([make_record(label="ddp", ranks=ranks)]))


def test_an_expert_that_idles_on_one_rank_is_named_with_the_rank() -> None:
    (finding,) = idle([["pooler"], ["pooler"]], [["pooler"], IDLE])
    assert finding.id == "idle-on-some-ranks"
    assert finding.message == (
        "ddp on 2 ranks: no gradient reaches moe.experts.0 on rank 1 in a step in which it does on others"
    )
    assert finding.values == {"ranks_by_module": {"moe.experts.0": [1]}}


def test_what_no_rank_trains_idles_nowhere() -> None:
    assert idle([IDLE], [IDLE]) == []
    assert idle([], [["pooler"]]) == []


def test_an_update_between_two_steps_is_outside_of_every_clock() -> None:
    for where, says in (("outside", "between two steps, where no clock runs"), ("forward", "next forward")):
        observed = ObservedPart(updates_by_phase={"step": 1, where: 2})
        (finding,) = find_late(Comparison([make_record(label="ddp", observed=observed)]))
        assert finding.id == "work-outside-clock"
        assert says in finding.message
        assert "2 of 3" in finding.message
    sound = ObservedPart(updates_by_phase={"step": 2, "backward": 4})
    assert find_late(Comparison([make_record(label="ddp", observed=sound)])) == []
