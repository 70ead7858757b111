from harness.job.experiment import ReportFocus
from harness.judge.comparison import Comparison
from harness.record import Record
from harness.tell.document import Heading, Line, Table
from harness.tell.first_page import FIGURES, MOST_ROWS, summary_cells, summary_section
from tests.harness.tell.cells import repeats
from tests.records import NORMS, make_communication, make_record, make_steps, make_weights

MOST_COLUMNS = 8


def tables(question: ReportFocus, *records: Record) -> list[Table]:
    section = summary_section(Comparison(records), question)
    assert section is not None
    return [block for block in section.blocks if isinstance(block, Table)]


def headings(*records: Record) -> list[str]:
    section = summary_section(Comparison(records), "all")
    assert section is not None
    return [block.text for block in section.blocks if isinstance(block, Heading)]


def note(*records: Record) -> str:
    section = summary_section(Comparison(records), "all")
    assert section is not None
    line = section.blocks[-1]
    assert isinstance(line, Line)
    return line.text


def shown(table: Table) -> dict[str, dict[str, str]]:
    """Text by backend and column."""
    keys = [column.key for column in table.columns]
    return {texts[0]: dict(zip(keys, texts, strict=True)) for texts in table.texts()}


def test_no_question_has_more_than_eight_columns() -> None:
    for question in FIGURES:
        for table in tables(question, make_record(), *repeats("ddp", 0.5), *repeats("fsdp", 0.6)):
            assert len(table.for_people().columns) <= MOST_COLUMNS, question


def test_ratios_are_to_ddp_on_the_same_ranks() -> None:
    records = [
        make_record(label=label, world_size=size, comm=make_communication(size, payload_bytes=sent))
        for size, base in ((2, 1000), (4, 8000))
        for label, sent in (("ddp", base), ("fsdp", base * 3 // 2))
    ]
    found = tables("all", make_record(), *records)
    assert len(found) == 2
    for table in found:
        ratios = {name: row["sent_bytes_per_step_of_ddp"] for name, row in shown(table).items()}
        assert ratios == {"ddp": "100 %", "fsdp": "150 %"}


def test_of_both_kinds_of_kernels_the_cells_that_are_timed_are_shown_next_to_their_base() -> None:
    """The others show their parity, which the details name."""
    records = [
        make_record(
            label=label, run_id=f"{label}-{asked}", training={"deterministic": asked},
            comm=make_communication(2, payload_bytes=sent),
        )
        for label, sent in (("ddp", 1000), ("fsdp", 1500))
        for asked in (True, False)
    ]  # fmt: skip
    (table,) = tables("all", make_record(), *records)
    ratios = {name: row["sent_bytes_per_step_of_ddp"] for name, row in shown(table).items()}
    assert ratios == {"ddp (not deterministic)": "100 %", "fsdp (not deterministic)": "150 %"}
    assert "Cells not shown: 2." in note(make_record(), *records)


def test_a_ratio_of_ten_and_more_is_a_multiple() -> None:
    records = [
        make_record(label=label, comm=make_communication(2, payload_bytes=sent))
        for label, sent in (("ddp", 1000), ("fsdp", 9900), ("zero3", 52_900))
    ]
    (table,) = tables("all", make_record(), *records)
    ratios = {name: row["sent_bytes_per_step_of_ddp"] for name, row in shown(table).items()}
    assert ratios == {"ddp": "100 %", "fsdp": "990 %", "zero3": "53 x"}


def test_without_ddp_there_are_no_ratios() -> None:
    (table,) = tables("all", make_record(), make_record(label="fsdp"), make_record(label="zero3"))
    assert not any(column.key.endswith("_of_ddp") for column in table.columns)


def test_the_reference_is_no_row_next_to_others() -> None:
    (table,) = tables("all", make_record(), make_record(label="ddp"))
    assert list(shown(table)) == ["ddp"]
    (table,) = tables("all", make_record())
    assert list(shown(table)) == ["single"]


def test_a_speed_has_the_interval_of_its_ratio_and_a_mark_where_it_is_open() -> None:
    (table,) = tables(
        "speed",
        *repeats("ddp", 0.5, 0.5, 0.51, 0.52, 0.52, 0.53),
        *repeats("fsdp", 0.505, 0.505, 0.515, 0.525, 0.525, 0.53),
        *repeats("zero2", 0.505, 0.605, 0.315, 0.525, 0.325, 0.93),
        *repeats("zero3", 1.0, 1.01, 1.02, 1.03, 1.04, 1.05),
        *repeats("zero1", 0.7),
    )
    assert [column.title for column in table.columns][2] == "speed / ddp"
    assert {name: row["speed_ratio"] for name, row in shown(table).items()} == {
        "ddp": "1", "fsdp": "0.99 (0.99 to 1.00)", "zero2": "~0.99 (0.57 to 1.62)",
        "zero3": "0.50 (0.50 to 0.50)", "zero1": "~0.71",
    }  # fmt: skip
    assert table.written(str, "**{}**")[3][2] == "**0.50 (0.50 to 0.50)**"


def test_without_a_pair_nothing_is_said_of_speeds() -> None:
    assert "bold: faster, slower, or equal within 5 %" in note(*repeats("ddp", 0.5), *repeats("fsdp", 0.6))


def test_cells_that_did_other_work_have_no_speed_and_their_parity_is_told() -> None:
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    wrong = make_record(label="zero1", steps=doubled, final_weights=make_weights("c" * 64))
    failed = make_record(label="zero2", status="failed", steps=[], ranks=[], comm=[], windows=None)
    (table,) = tables("speed", make_record(), make_record(label="ddp"), wrong, failed)
    rows = shown(table)
    assert (rows["zero1"]["speed_ratio"], rows["zero1"]["parity"]) == ("n/a", "diverged")
    assert (rows["zero2"]["tokens_per_second"], rows["zero2"]["parity"]) == ("n/a", "failed")


def test_what_was_not_asked_is_no_column() -> None:
    speeds = {"tokens_per_second", "step_seconds", "speed_ratio"}
    unasked: tuple[ReportFocus, ...] = ("memory", "parity")
    for question in unasked:
        (table,) = tables(question, make_record(), make_record(label="ddp"))
        assert speeds.isdisjoint(column.key for column in table.columns)


def test_jobs_that_ran_on_as_many_ranks_have_a_table_each() -> None:
    other = [make_record(label=label, job_id="b" * 12) for label in ("single", "ddp")]
    records = [make_record(), make_record(label="ddp"), *other]
    assert headings(*records) == ["2 ranks, job 0123456789ab", "2 ranks, job bbbbbbbbbbbb"]
    assert headings(*records[:2]) == []


def test_of_too_many_cells_those_that_tell_most_are_shown() -> None:
    many = [make_record(label=f"zero1:n={n}") for n in range(MOST_ROWS + 5)]
    doubled = make_steps(norms=[norm * 2 for norm in NORMS])
    wrong = make_record(label="zero3", steps=doubled, final_weights=make_weights("c" * 64))
    records = [make_record(), *many, make_record(label="ddp"), wrong]
    found = [group.label for group in summary_cells(Comparison(records), 6)]
    assert len(found) == 6
    assert {"ddp", "zero3"} <= set(found)
    assert f"Cells not shown: {len(many) + 2 - MOST_ROWS}." in note(*records)


def test_of_too_many_cells_those_through_accelerate_with_the_same_figures_are_left_out() -> None:
    labels = ("ddp", "accelerate-ddp", "zero1", "accelerate-zero1")
    records = [make_record(), *(make_record(label=label) for label in labels)]
    comparison = Comparison(records)
    assert [group.label for group in summary_cells(comparison, 3)] == ["ddp", "zero1"]
    assert len(summary_cells(comparison, 4)) == 4
    more = make_record(label="accelerate-zero1", comm=make_communication(2, payload_bytes=90_000))
    found = summary_cells(Comparison([*records[:-1], more]), 3)
    assert [group.label for group in found] == ["ddp", "zero1", "accelerate-zero1"]
