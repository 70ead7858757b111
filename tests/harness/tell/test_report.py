"""Whole reports: long tables, cells on several nodes, before and after, a CUDA stub for a GPU."""

import pytest

from harness.forms.textbook import find_peak
from harness.judge.comparison import Comparison
from harness.judge.quantities import first_timed, rate
from harness.record import ErrorPart
from harness.tell.before_after import before_after
from harness.tell.document import Document, Folded, Table
from harness.tell.first_page import rank_words
from harness.tell.report import LONGEST_OPEN_TABLE, details_document
from harness.tell.writers.text import render_markdown
from tests.harness.tell.cells import blocks_in, lines_of, markdown_of, page_of, repeats, with_world
from tests.records import make_record, on_stub, published_comparison


def document(cells: int) -> Document:
    return details_document(Comparison([make_record(label=f"ddp:cell={number}") for number in range(cells)]))


def open_tables(of: Document) -> set[str]:
    return {block.key for section in of.sections for block in section.blocks if isinstance(block, Table)}


def test_a_long_table_stands_behind_its_name_and_length_the_results_never() -> None:
    short, long = document(LONGEST_OPEN_TABLE), document(LONGEST_OPEN_TABLE + 1)
    assert {"results", "memory_after_backward"} <= open_tables(short)
    assert "results" in open_tables(long)
    assert "memory_after_backward" not in open_tables(long)
    titles = [fold.title for part in long.sections for fold in blocks_in(part, Folded)]
    assert "Memory after backward: 31 lines" in titles


@pytest.fixture(scope="module")
def rows() -> Comparison:
    """Six strategies, among them on four ranks of one node and of two."""
    return published_comparison("same-job-on-nodes")


def test_every_table_calls_a_cell_by_its_whole_name(rows: Comparison) -> None:
    cells = {(group.label, group.world_size) for group in rows.groups}
    assert {("ddp (1 node x 4)", 4), ("ddp (2 nodes x 2)", 4), ("ddp", 2)} <= cells
    told = {
        table.key: {(line["backend"], int(line["world_size"])) for line in lines_of(table)}
        for table in details_document(rows).tables()
        if {"backend", "world_size"} <= {column.key for column in table.columns}
    }
    assert {name: pairs - cells for name, pairs in told.items() if pairs - cells} == {}
    assert {"slurm_jobs", "parity_distances", "communication_volume", "time", "probe_cost"} <= set(told)


def test_cells_are_ordered_by_ranks_nodes_and_backend(rows: Comparison) -> None:
    worlds = [(group.world_size, group.record.world.nodes) for group in rows.groups]
    assert worlds == sorted(worlds)
    on_two = [group.backend for group in rows.groups if group.world_size == 2]
    assert on_two == ["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-hybrid"]


def sides(**status: str) -> Comparison:
    """The reference and a run of each backend, with its status."""
    error = ErrorPart(kind="Exit", message="gone")
    runs = [
        make_record(label=label, status=how, error=None if how == "ok" else error)
        for label, how in status.items()
    ]
    return Comparison([make_record(), *runs])


def section(of: Document, key: str) -> str:
    only = Document("", [section for section in of.sections if section.key == key])
    return render_markdown(only, {}, "", "")


def test_lost_and_new_cells_are_in_the_verdict() -> None:
    before = sides(ddp="ok", zero1="ok", fsdp="oom")
    text = section(before_after(before, sides(ddp="failed", fsdp="ok", zero3="ok")), "verdict")
    failed = "fsdp on 2 ranks before (oom: Exit: gone) and ddp on 2 ranks after (failed: Exit: gone)."
    assert f"Without a whole result: {failed}" in text
    assert "Lost: ddp on 2 ranks: failed after.\n\nLost: zero1 on 2 ranks: absent after." in text
    once = "zero3 on 2 ranks after and fsdp on 2 ranks after."
    assert f"Not compared, as no other side has a result: {once}" in text


def test_every_lost_and_new_cell_is_named() -> None:
    few, many = sides(), sides(**{f"zero1:bucket={n}": "ok" for n in range(9)})
    lost = section(before_after(many, few), "verdict")
    assert lost.count(" on 2 ranks: absent after.") == 9
    new = section(before_after(few, many), "verdict")
    assert new.count(" on 2 ranks after") == 9
    assert "Lost" not in new


def test_equal_sides_have_no_empty_table() -> None:
    document = before_after(sides(ddp="ok"), sides(ddp="ok"))
    assert all(table.rows for table in document.tables())
    assert "Equal, or within noise, from before to after: tokens/s, peak" in section(document, "verdict")
    assert "None differs." in section(document, "changes")


def page() -> tuple[str, str]:
    """Of a CUDA stub, and its details."""
    runs = (make_record(), *repeats("ddp", 0.5, 0.6), *repeats("fsdp", 0.7))
    return markdown_of(page_of(map(on_stub, runs)))


def test_the_device_is_a_stub_in_title_scope_and_machine() -> None:
    short, details = page()
    assert short.startswith("# model with 0.001 M parameters on 2 CUDA stub ranks")
    assert "2 CUDA stub ranks over nccl" in short
    assert "no kernel ran, so peaks and speeds are unknown" in short
    assert "cuda (CUDA stub), collectives over nccl" in details


def test_an_unsupported_backend_next_to_it_makes_no_gpu_of_it() -> None:
    unsupported = make_record(label="fsdp-hybrid", status="unsupported", ranks=[], steps=[])
    runs = [*map(on_stub, (make_record(), make_record(label="ddp")))]
    runs.append(with_world(unsupported, device="cuda", collectives="nccl"))
    assert rank_words(Comparison(runs)) == "2 CUDA stub ranks"


def test_no_figure_of_speed_is_left() -> None:
    short, details = page()
    assert "no kernel runs on a CUDA stub" in short
    for text in (short, details):
        assert "2,048" not in text  # 1,024 tokens in 0.5 s
        assert "tokens/s)" not in text
    assert "fastest" not in short


def test_steps_of_a_stub_are_not_timed_and_those_of_others_are() -> None:
    record = make_record(label="ddp")
    assert first_timed(record) == 2
    assert rate(record, "tokens") == 2048
    assert first_timed(on_stub(record)) == 4
    assert rate(on_stub(record), "tokens") is None


def test_that_nothing_is_timed_is_no_finding_on_a_stub() -> None:
    runs = [on_stub(record) for record in (make_record(), make_record(label="ddp"))]
    assert "nothing-timed" not in {found.id for found in Comparison(runs).findings}


def test_a_stub_has_no_peak_whatever_name_it_was_given() -> None:
    assert find_peak("NVIDIA A100-SXM4-80GB", "bfloat16") is not None
    assert find_peak("CUDA stub NVIDIA A100-SXM4-80GB", "bfloat16") is None
