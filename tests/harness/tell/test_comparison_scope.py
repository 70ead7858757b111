from hypothesis import given
from hypothesis import strategies as st

from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.sections.choice import bytes_frontier, comparison_scope, peak, sent_once, worth_taking
from tests.harness.tell.cells import stage_of
from tests.records import NORMS, make_communication, make_ranks, make_record, make_steps, make_weights

FIGURES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7)


def labels(*records: Record) -> list[str]:
    return [group.label for group in stage_of(*records).groups]


def with_peak(label: str, sent: int, most: int) -> Record:
    ranks = [
        rank.model_copy(
            update={"memory": [part.model_copy(update={"peak_bytes": most}) for part in rank.memory]}
        )
        for rank in make_ranks(2)
    ]
    return make_record(label=label, ranks=ranks, comm=make_communication(2, payload_bytes=sent))


def test_the_reference_does_not_make_one_rank_the_place_to_compare() -> None:
    alone = [make_record(label=label, world_size=1) for label in ("ddp", "fsdp")]
    two = [make_record(label=label) for label in ("ddp", "fsdp")]
    found = stage_of(make_record(), *alone, *two)
    assert (found.size, [g.label for g in found.groups]) == (2, ["ddp", "fsdp"])


def test_ranks_with_cores_of_their_own_are_compared_before_those_that_take_turns() -> None:
    wide = [make_record(label=label, world_size=16) for label in ("ddp", "fsdp", "zero1")]
    assert stage_of(make_record(), *wide, make_record(label="ddp"), make_record(label="fsdp")).size == 2


def test_ddp_is_the_base_whatever_marks_all_labels_of_its_place() -> None:
    kinds = [
        make_record(label=label, training={"deterministic": asked})
        for label in ("fsdp", "ddp")
        for asked in (True, False)
    ]
    base = stage_of(make_record(), *kinds).base
    assert base is not None
    assert base.label == "ddp (not deterministic)"


def test_the_reference_is_compared_only_where_it_ran_alone() -> None:
    assert labels(make_record(), make_record(label="ddp", world_size=1)) == ["ddp"]
    assert labels(make_record()) == ["single"]


def test_what_diverged_failed_or_is_wrong_on_purpose_is_not_compared() -> None:
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    wrong = make_record(label="zero1", steps=doubled, final_weights=make_weights("c" * 64))
    failed = make_record(label="zero2", status="failed")
    planted = make_record(label="planted-wrong-beta2")
    assert labels(make_record(), make_record(label="ddp"), wrong, failed, planted) == ["ddp"]


def test_nothing_is_compared_where_nothing_succeeded() -> None:
    assert comparison_scope(Comparison([make_record(status="failed", steps=[], ranks=[], comm=[])])) is None


def test_a_cell_under_other_conditions_than_all_others_is_alone() -> None:
    other = make_record(label="fsdp")
    other = other.model_copy(update={"world": other.world.model_copy(update={"micro_batch_size": 1})})
    assert stage_of(make_record(), make_record(label="ddp"), other).is_alone
    assert not stage_of(make_record(), make_record(label="ddp")).is_alone


@given(FIGURES)
def test_the_frontier_of_bytes_holds_exactly_the_cells_that_no_other_beats(
    figures: list[tuple[int, int]],
) -> None:
    groups = [with_peak(f"ddp:n={n}", 4000 * s, 10**6 * m) for n, (s, m) in enumerate(figures)]
    found = [group.label for group in bytes_frontier(stage_of(make_record(), *groups))]
    known = {f"ddp:n={n}": figure for n, figure in enumerate(figures)}
    front = [known[label] for label in found]
    assert front == sorted(front), "traffic rises"
    assert [m for _, m in front] == sorted({m for _, m in front}, reverse=True), "memory falls"
    for sent, most in figures:
        assert any(s <= sent and m <= most for s, m in front), "nothing is left out that none beats"


def test_the_peak_of_a_cell_is_that_of_the_rank_that_needs_most() -> None:
    assert peak(stage_of(make_record(label="ddp")).groups[0]) == 2_001_000


def test_a_backend_that_is_not_installed_has_the_most_moving_parts() -> None:
    groups = [
        with_peak("of-others", 8, 4),
        with_peak("ddp:of-another-version=1", 8, 3),
        with_peak("fsdp", 8, 5),
    ]
    place = stage_of(make_record(), *groups)
    found = worth_taking(place, place.figures(sent_once), place.figures(peak))
    assert found == ["fsdp", "ddp:of-another-version=1"]
    assert [group.label for group in bytes_frontier(place)] == ["ddp:of-another-version=1"]
