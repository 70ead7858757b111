from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Block, Line, Paragraph, Table
from harness.tell.sections.choice import NONE_FITS, choice_section
from tests.harness.tell.cells import repeats
from tests.pipelines import make_pipeline
from tests.records import make_communication, make_ranks, make_record, published


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


def blocks(question: ReportFocus, *records: Record) -> list[Block]:
    section = choice_section(Comparison(records), question)
    return [] if section is None else list(section.blocks)


def table(key: str, question: ReportFocus, *records: Record) -> list[list[str]]:
    found = [block for block in blocks(question, *records) if isinstance(block, Table) and block.key == key]
    return found[0].texts() if found else []


def advice(question: ReportFocus, *records: Record) -> dict[str, str]:
    return {b.name: b.text for b in blocks(question, *records) if isinstance(b, Line)}


def notes(question: ReportFocus, *records: Record) -> str:
    return "\n".join(b.text for b in blocks(question, *records) if isinstance(b, Paragraph))


def on_gpu(record: Record) -> Record:
    return record.model_copy(update={"world": record.world.model_copy(update={"device": "cuda"})})


def test_a_threshold_is_a_row_and_so_is_a_simpler_cell_that_sends_no_more() -> None:
    assert table("decision", "all", *map(on_gpu, CELLS)) == [
        ["1", "from 9.00", "ddp", "4.00"],
        ["1", "from 8.00", "zero1", "6.00"],
        ["1", "from 3.00", "fsdp", "6.00"],
        ["1", "less", NONE_FITS, ""],
    ]


def test_of_cpu_ranks_the_thresholds_are_what_strategies_hold_on_gpus_besides_activations() -> None:
    default = published("default")
    assert table("decision", "all", *default) == [
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
    assert ["zero3", "7.36", "82.2"] in table("elsewhere", "all", *default)


def test_memory_is_named_by_what_it_counts_and_cells_without_a_row_are_named() -> None:
    default = published("default")
    found = blocks("all", *default)
    titles = {b.key: [column.title for column in b.columns] for b in found if isinstance(b, Table)}
    assert titles["decision"][1] == "memory without activations, MB"
    assert titles["elsewhere"][1] == "memory without activations, MB"
    text = notes("all", *default)
    worse = "zero0, zero2, zero3, zero3:preset=library-defaults, fsdp, fsdp1"
    assert f"Left out, no better in memory or traffic: {worse}." in text
    assert text.endswith("Left out, needs more: zero3:preset=library-defaults.")
    of_gpus = [b for b in blocks("all", *map(on_gpu, CELLS)) if isinstance(b, Table) and b.key == "decision"]
    assert of_gpus[0].columns[1].title == "peak memory, MB"


def test_of_pipelines_the_bubble_is_named_which_neither_memory_nor_traffic_shows() -> None:
    run = make_pipeline()
    of_as_many_samples = run.world.model_copy(update={"micro_batch_size": 8})
    pipeline = run.model_copy(update={"world": of_as_many_samples})
    assert "ranks idle (the bubble): pp 20 %." in notes("all", *map(on_gpu, [*CELLS, pipeline]))
    assert "bubble" not in notes("all", *CELLS)


def test_a_question_on_memory_is_not_answered_with_speed_or_traffic() -> None:
    records = published("bloom-560m")
    assert table("decision", "memory", *records) == []
    assert table("elsewhere", "memory", *records)[-1] == ["zero3", "1,134", "87.4", "514", "533"]
    assert "zero2: model states hold 496 MB of gradients" in notes("memory", *records)
    assert advice("memory", *records) == {}
    assert blocks("parity", *records) == blocks("scaling", *records) == []


def test_what_ranks_hold_and_send_is_answered_without_speed() -> None:
    assert table("decision", "footprint", *published("default"))
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
