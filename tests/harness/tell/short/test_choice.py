from harness.job.experiment import Question
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Items
from harness.tell.short.choice import choice_section
from tests.harness.tell.short.records import repeats
from tests.pipelines import make_pipeline
from tests.records import make_communication, make_ranks, make_record


def cell(label: str, sent: int, peak: int) -> Record:
    ranks = [
        rank.model_copy(
            update={"memory": [part.model_copy(update={"peak_bytes": peak}) for part in rank.memory]}
        )
        for rank in make_ranks(2)
    ]
    return make_record(label=label, ranks=ranks, comm=make_communication(2, payload_bytes=sent))


CELLS = [
    make_record(),
    cell("ddp", 4_000_000, 9_000_000),
    cell("zero1", 6_000_000, 8_000_000),
    cell("fsdp", 6_000_000, 3_000_000),
]


def advice(question: Question, *records: Record) -> dict[str, str]:
    section = choice_section(Comparison(records), question)
    if section is None:
        return {}
    (block,) = section.blocks
    assert isinstance(block, Items)
    return {line.name: line.text for line in block.lines()}


def test_cells_are_named_in_the_order_to_try_and_none_that_another_beats() -> None:
    assert advice("all", *CELLS)["Take"] == (
        "the first whose peak per rank fits, with its traffic: ddp 9.00 MB (1 x), fsdp 3.00 MB (1.5 x)."
    )


def test_of_pipelines_the_bubble_is_named_which_neither_peak_nor_traffic_shows() -> None:
    run = make_pipeline()
    of_as_many_samples = run.world.model_copy(update={"micro_batch_size": 8})
    text = advice("all", *CELLS, run.model_copy(update={"world": of_as_many_samples}))["Take"]
    assert text.endswith("the bubble, in which ranks of a pipeline wait: pp 20 % of the passes.")
    assert "bubble" not in advice("all", *CELLS)["Take"]


def test_who_sends_least_on_slow_links_is_named_with_the_ratio_of_the_others() -> None:
    text = advice("speed", *CELLS)["Slow links"]
    assert text == "ddp sends least (4.00 MB per rank and step); zero1 and fsdp 1.5 x of that."


def test_a_question_on_memory_is_not_answered_with_speed_or_traffic() -> None:
    assert set(advice("memory", *CELLS)) <= {"Does it fit"}
    assert advice("parity", *CELLS) == {}
    assert advice("scaling", *CELLS) == {}


def test_what_ranks_hold_and_send_is_answered_without_speed() -> None:
    found = advice("footprint", *CELLS)
    assert {"Take", "Slow links"} <= set(found)
    assert not {"Speed here", "Slowest"} & set(found)


def test_speed_is_advised_only_where_the_runs_support_an_order() -> None:
    few = [*repeats("ddp", 0.5), *repeats("zero3", 1.0)]
    assert "Speed here" not in advice("speed", *few)
    more = [*repeats("ddp", *[0.5, 0.51] * 3), *repeats("zero3", *[1.0, 1.1] * 3)]
    assert "measure speed again on your GPUs" in advice("speed", *more)["Speed here"]


def test_with_one_cell_or_one_rank_nothing_is_to_be_chosen() -> None:
    assert advice("all", make_record(), make_record(label="ddp")) == {}
    assert advice("all", *(make_record(label=label, world_size=1) for label in ("ddp", "fsdp"))) == {}
