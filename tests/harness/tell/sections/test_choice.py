from hypothesis import given
from hypothesis import strategies as st

from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Block, Line, Paragraph, Table
from harness.tell.sections.choice import (
    NONE_FITS,
    bytes_frontier,
    choice_section,
    comparison_scope,
    peak,
    sent_once,
    worth_taking,
)
from tests.harness.tell.cells import of_size, repeats, stage_of, with_world
from tests.pipelines import make_pipeline
from tests.records import (
    NORMS,
    make_record,
    make_steps,
    make_weights,
    published,
)

CELLS = [
    make_record(),
    of_size("ddp", 9_000_000, sent=4_000_000),
    of_size("zero1", 8_000_000, sent=6_000_000),
    of_size("fsdp", 3_000_000, sent=6_000_000),
]


def blocks(question: ReportFocus, *records: Record) -> list[Block]:
    section = choice_section(Comparison(records), question)
    return [] if section is None else list(section.blocks)


def tables(question: ReportFocus, *records: Record) -> dict[str, Table]:
    return {block.key: block for block in blocks(question, *records) if isinstance(block, Table)}


def advice(question: ReportFocus, *records: Record) -> dict[str, str]:
    return {b.name: b.text for b in blocks(question, *records) if isinstance(b, Line)}


def notes(question: ReportFocus, *records: Record) -> str:
    return "\n".join(b.text for b in blocks(question, *records) if isinstance(b, Paragraph))


def on_gpu(record: Record) -> Record:
    return with_world(record, device="cuda")


def test_a_threshold_is_a_row_and_so_is_a_simpler_cell_that_sends_no_more() -> None:
    assert tables("all", *map(on_gpu, CELLS))["decision"].texts() == [
        ["1", "from 9.00", "ddp", "4.00"],
        ["1", "from 8.00", "zero1", "6.00"],
        ["1", "from 3.00", "fsdp", "6.00"],
        ["1", "less", NONE_FITS, ""],
    ]


def test_of_cpu_ranks_the_thresholds_are_what_strategies_hold_on_gpus_besides_activations() -> None:
    default = published("default")
    assert tables("all", *default)["decision"].texts() == [
        ["1", "from 13.9", "ddp", "3.48"],
        ["1", "from 10.0", "fsdp-grad-op", "3.48"],
        ["1", "from 9.64", "fsdp:preset=library-defaults", "5.09"],
        ["1", "less", NONE_FITS, ""],
        ["8", "from 17.4", "ddp", "3.48"],
        ["8", "from 15.7", "zero1", "5.22"],
        ["8", "from 13.0", "fsdp-grad-op", "15.7"],
        ["8", "from 11.0", "fsdp:preset=library-defaults", "28.5"],
        ["8", "less", NONE_FITS, ""],
    ]
    assert ["zero3", "7.36", "82.2"] in tables("all", *default)["elsewhere"].texts()


def test_memory_is_named_by_what_it_counts_and_cells_without_a_row_are_named() -> None:
    default = published("default")
    for name in ("decision", "elsewhere"):
        assert tables("all", *default)[name].columns[1].title == "memory without activations, MB"
    text = notes("all", *default)
    worse = "zero0, zero2, zero3, zero3:preset=library-defaults, fsdp, fsdp1"
    assert f"Left out, no better in memory or traffic: {worse}." in text
    assert text.endswith("Left out, needs more: zero3:preset=library-defaults.")
    assert tables("all", *map(on_gpu, CELLS))["decision"].columns[1].title == "peak memory, MB"


def test_of_pipelines_the_bubble_is_named_which_neither_memory_nor_traffic_shows() -> None:
    pipeline = with_world(make_pipeline(), micro_batch_size=8)  # of as many samples
    assert "ranks idle (the bubble): pp 20 %." in notes("all", *map(on_gpu, [*CELLS, pipeline]))
    assert "bubble" not in notes("all", *CELLS)


def test_a_question_on_memory_is_not_answered_with_speed_or_traffic() -> None:
    records = published("bloom-560m")
    assert "decision" not in tables("memory", *records)
    assert tables("memory", *records)["elsewhere"].texts()[-1] == ["zero3", "1,134", "87.4", "514", "533"]
    assert "zero2: model states hold 496 MB of gradients" in notes("memory", *records)
    assert advice("memory", *records) == {}
    assert blocks("parity", *records) == blocks("scaling", *records) == []


def test_what_ranks_hold_and_send_is_answered_without_speed() -> None:
    assert "decision" in tables("footprint", *published("default"))
    assert advice("footprint", *CELLS) == {}


def test_speed_is_advised_only_on_gpus_and_where_the_runs_support_an_order() -> None:
    few = [*repeats("ddp", 0.5), *repeats("zero3", 1.0)]
    assert "Pareto frontier" not in advice("speed", *map(on_gpu, few))
    more = [*repeats("ddp", *[0.5, 0.51] * 3), *repeats("zero3", *[1.0, 1.1] * 3)]
    assert advice("speed", *map(on_gpu, more))["Pareto frontier"].startswith("speed relative to ddp, and")
    assert "Pareto frontier" not in advice("speed", *more)


def test_with_one_cell_or_one_rank_nothing_is_to_be_chosen() -> None:
    assert blocks("all", make_record(), make_record(label="ddp")) == []
    assert blocks("all", *(make_record(label=label, world_size=1) for label in ("ddp", "fsdp"))) == []


FIGURES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7)


def labels(*records: Record) -> list[str]:
    return [group.label for group in stage_of(*records).groups]


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
    other = with_world(make_record(label="fsdp"), micro_batch_size=1)
    assert stage_of(make_record(), make_record(label="ddp"), other).is_alone
    assert not stage_of(make_record(), make_record(label="ddp")).is_alone


@given(FIGURES)
def test_the_frontier_of_bytes_holds_exactly_the_cells_that_no_other_beats(
    figures: list[tuple[int, int]],
) -> None:
    groups = [of_size(f"ddp:n={n}", 10**6 * m, sent=4000 * s) for n, (s, m) in enumerate(figures)]
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
        of_size("of-others", 4, sent=8),
        of_size("ddp:of-another-version=1", 3, sent=8),
        of_size("fsdp", 5, sent=8),
    ]
    place = stage_of(make_record(), *groups)
    found = worth_taking(place, place.figures(sent_once), place.figures(peak))
    assert found == ["fsdp", "ddp:of-another-version=1"]
    assert [group.label for group in bytes_frontier(place)] == ["ddp:of-another-version=1"]
