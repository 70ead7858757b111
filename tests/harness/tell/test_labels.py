"""Runs of one backend and number of ranks on other numbers of nodes are told apart wherever they stand."""

import pytest

from harness.judge.comparison import Comparison
from harness.tell.report import details_document
from tests.records import published_comparison


@pytest.fixture(scope="module")
def rows() -> Comparison:
    """Six strategies, among them on four ranks of one node and of two."""
    return published_comparison("same-job-on-nodes")


def test_every_table_calls_a_cell_by_its_whole_name(rows: Comparison) -> None:
    cells = {(group.label, group.world_size) for group in rows.groups}
    assert {("ddp (1 node x 4)", 4), ("ddp (2 nodes x 2)", 4), ("ddp", 2)} <= cells
    told = {}
    for table in details_document(rows).tables():
        keys = [column.key for column in table.columns]
        if {"backend", "world_size"} <= set(keys):
            places = keys.index("backend"), keys.index("world_size")
            told[table.key] = {(row[places[0]], row[places[1]]) for row in table.values()}
    assert {name: pairs - cells for name, pairs in told.items() if pairs - cells} == {}
    assert {"slurm_jobs", "parity_distances", "communication_volume", "time", "probe_cost"} <= set(told)


def test_cells_are_ordered_by_ranks_nodes_and_backend(rows: Comparison) -> None:
    worlds = [(group.world_size, group.record.world.nodes) for group in rows.groups]
    assert worlds == sorted(worlds)
    on_two = [group.backend for group in rows.groups if group.world_size == 2]
    assert on_two == ["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-hybrid"]
