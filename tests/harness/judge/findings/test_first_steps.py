"""What is looked at in the first steps: who gets a gradient, and when updates are made."""

from harness.judge.findings.finding import Finding
from harness.record import ObservedPart, Record
from tests.harness.judge.findings.told import told
from tests.records import NORMS, make_ranks, make_record, make_steps

IDLE = ["moe.experts.0.down.weight", "moe.experts.0.up.weight", "pooler.weight"]
POOLER = ["pooler.weight"]
Steps = dict[int, list[str] | None]


def find_idle(records: list[Record]) -> list[Finding]:
    return told(records, "idle-on-some-ranks", "gradient-lost")


def missing(*of_ranks: Steps, reference: Steps | None = None, norm: float = 1.0) -> list[Finding]:
    """norm: gradient norms, as a share of the reference's."""
    ranks = [
        part.model_copy(update={"without_gradient": steps})
        for part, steps in zip(make_ranks(2), of_ranks, strict=True)
    ]
    (first,) = make_ranks(1)
    alone = make_record(ranks=[first.model_copy(update={"without_gradient": reference or {}})])
    steps = make_steps(norms=[norm * value for value in NORMS])
    return find_idle([alone, make_record(label="ddp", ranks=ranks, steps=steps)])


def test_an_expert_that_idles_on_one_rank_is_named_with_the_rank_and_the_step() -> None:
    (finding,) = missing({0: POOLER}, {0: POOLER, 3: IDLE}, norm=0.7)
    assert finding.id == "idle-on-some-ranks"
    assert finding.message == (
        "ddp on 2 ranks: no gradient reaches moe.experts.0.down.weight, moe.experts.0.up.weight (ranks: "
        "1; step: 3), while others have one"
    )
    assert finding.values == {"missing": [{"step": 3, "names": IDLE[:2], "ranks": [1]}]}


def test_an_expert_that_idles_in_a_run_that_agrees_is_not_accused() -> None:
    assert missing({0: POOLER}, {0: POOLER, 3: IDLE}) == []


def test_an_expert_that_idles_in_a_run_that_cannot_be_judged_is_not_accused() -> None:
    ranks = [
        part.model_copy(update={"without_gradient": steps})
        for part, steps in zip(make_ranks(2), ({0: POOLER}, {0: IDLE}), strict=True)
    ]
    run = make_record(label="ddp", ranks=ranks, steps=make_steps(norms=[0.7 * value for value in NORMS]))
    assert [finding.id for finding in find_idle([make_record(), run])] == ["idle-on-some-ranks"]
    dropout = ObservedPart(dropout=0.1)
    unjudged = [make_record(observed=dropout), run.model_copy(update={"observed": dropout})]
    for records in ([run], unjudged):
        assert find_idle(records) == []


def test_what_no_rank_trains_idles_nowhere() -> None:
    assert missing({0: IDLE}, {0: IDLE}) == []
    assert missing({}, {0: POOLER}) == []
    assert missing({0: POOLER, 2: None}, {0: POOLER, 3: IDLE}, norm=0.7) == []


def test_a_gradient_that_every_rank_loses_is_named_where_the_reference_keeps_it() -> None:
    ranks = ({0: POOLER, 2: IDLE}, {0: POOLER, 2: IDLE})
    (finding,) = missing(*ranks, reference={0: POOLER})
    assert finding.id == "gradient-lost"
    assert "moe.experts.0.up.weight on any rank from step 2 on" in finding.message
    assert finding.values == {"step": 2, "parameters": IDLE[:2]}
    assert missing(*ranks) == []
    assert missing(*ranks, reference={0: POOLER, 2: IDLE}) == []
    assert missing(*({**steps, 3: POOLER} for steps in ranks), reference={0: POOLER}) == []


def test_an_update_between_two_steps_is_outside_of_every_clock() -> None:
    for where, says in (("outside", "between two steps, where no clock runs"), ("forward", "next forward")):
        observed = ObservedPart(updates_by_phase={"step": 1, where: 2})
        (finding,) = told([make_record(label="ddp", observed=observed)], "work-outside-clock")
        assert finding.id == "work-outside-clock"
        assert says in finding.message
        assert "2 of 3" in finding.message
    sound = ObservedPart(updates_by_phase={"step": 2, "backward": 4})
    assert told([make_record(label="ddp", observed=sound)], "work-outside-clock") == []
