"""Bytes within and between nodes, from groups and hosts."""

from typing import Literal

import pytest

from harness.forms.network import NodeTraffic, node_traffic
from harness.judge.comparison import Comparison
from harness.record import CommunicationPart, Record
from harness.tell.sections.amounts import node_volumes, nodes_section
from tests.records import changed, make_ranks, make_record

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
P = 4000


def test_a_flat_ring_crosses_at_one_edge_of_each_node() -> None:
    sent = [node_traffic("nccl", "all_gather", P, [0, 1, 2, 3], rank, HOSTS) for rank in range(4)]
    assert sent == [
        NodeTraffic(inside=3000), NodeTraffic(between=3000),
        NodeTraffic(inside=3000), NodeTraffic(between=3000),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("transport", "op", "group", "rank", "inside", "between"),
    [
        pytest.param("nccl", "reduce_scatter", [2, 3], 3, 2000, 0, id="a shard group stays"),
        pytest.param("nccl", "all_reduce", [1, 3], 1, 0, 4000, id="a replica group crosses"),
        pytest.param("gloo", "reduce_scatter", [1, 3], 1, 0, 4000, id="an emulated one counts as what runs"),
        pytest.param("nccl", "all_reduce", [1], 1, 0, 0, id="a group of one sends nothing"),
        pytest.param("nccl", "all_to_all", [0, 1, 2, 3], 0, 1000, 2000, id="each peer as much"),
    ],
)
def test_what_a_rank_sends_within_and_between_nodes_follows_from_its_group(
    transport: str, op: str, group: list[int], rank: int, inside: int, between: int
) -> None:
    sent = node_traffic(transport, op, P, group, rank, HOSTS)
    assert sent == NodeTraffic(inside=inside, between=between)


def test_a_pipeline_sends_forward_to_the_next_rank_and_back_to_the_one_before() -> None:
    sent = {
        (phase, rank): node_traffic("gloo", "send", P, [0, 1, 2, 3], rank, HOSTS, phase=phase).between
        for phase in ("forward", "backward")
        for rank in (1, 2)
    }
    assert sent == {
        ("forward", 1): P, ("forward", 2): 0, ("backward", 1): 0, ("backward", 2): P,
    }  # fmt: skip


def test_groups_of_other_dimensions_have_a_column_where_they_cross() -> None:
    across = hybrid()
    comm = [row.model_copy(update={"role": "data+sequence"}) for row in across.comm if row.role == "replica"]
    section = nodes_section(Comparison([across, across.model_copy(update={"comm": comm, "repeat": 1})]))
    assert "by data+sequence groups MB" not in [column.title for column in section.blocks[1].columns]  # type: ignore[union-attr]
    section = nodes_section(Comparison([across.model_copy(update={"comm": comm})]))
    titles = [column.title for column in section.blocks[1].columns]  # type: ignore[union-attr]
    (row,) = section.blocks[1].rows  # type: ignore[union-attr]
    assert dict(zip(titles, row, strict=True))["by data+sequence groups MB"] == P


def hybrid() -> Record:
    """2 x 2 ranks: shards of P bytes within nodes, an all-reduce of P / 2 across them."""

    def part(
        rank: int, op: str, role: Literal["shard", "replica"], payload: int, phase: str
    ) -> CommunicationPart:
        group = [rank // 2 * 2, rank // 2 * 2 + 1] if role == "shard" else [rank % 2, rank % 2 + 2]
        return CommunicationPart(
            rank=rank, phase=phase, op=op, dtype="float32", group=f"{role}{group[0]}", group_ranks=group,
            group_size=2, calls=1, payload_bytes=payload, role=role,
        )  # fmt: skip

    comm = [
        row
        for rank in range(4)
        for row in (
            part(rank, "all_gather", "shard", P, "forward"),
            part(rank, "all_reduce", "replica", P // 2, "backward"),
            part(rank, "broadcast", "replica", 10 * P, "setup"),
        )
    ]
    return make_record(
        label="fsdp-hybrid", world_size=4, comm=comm,
        world={"nodes": 2, "ranks_per_node": 2},
        ranks=make_ranks(4, host=[*HOSTS.values()]),
    )  # fmt: skip


def test_hybrid_sharding_crosses_by_replica_groups_alone() -> None:
    for volume in node_volumes(hybrid()):
        assert volume.inside == 2 * P // 2
        assert volume.between == 2 * P // 2
        assert volume.between_by_role == {"replica": P}


@pytest.mark.parametrize("label", ["single", "ddp"])
def test_one_node_has_no_section(label: str) -> None:
    assert nodes_section(Comparison([make_record(label=label)])) is None


def test_the_section_says_what_crosses_in_one_line_of_all_repeats() -> None:
    section = nodes_section(Comparison([hybrid(), changed(hybrid(), repeat=1)]))
    (row,) = section.blocks[1].rows  # type: ignore[union-attr]
    assert list(row) == ["fsdp-hybrid", 2, 4, P, P, 0.0, 0.0, P]
