"""Traffic of a plan: its sum is the closed form's, and what crosses nodes is what the rings cross."""

import pytest

from harness.forms.network import node_traffic
from harness.forms.workload import Role, Workload
from harness.plan.prediction import crossing_share, step_traffic
from tests.harness.plan.asking import states

MIXED = "training.precision=bf16-mixed"


@pytest.mark.parametrize("backend", ["ddp", "zero2", "fsdp", "fsdp-hybrid:shard_size=2"])
def test_crossing_bytes_are_those_that_every_rank_sends_to_another_node(backend: str) -> None:
    found = states(MIXED, backends=backend, world_sizes=(8,), per_node=4)
    workload = found.scenario.workload()
    hosts = {rank: str(rank // 4) for rank in range(8)}
    for line in found.traffic:
        every = [
            node_traffic(
                "nccl",
                line.collective.op,
                line.collective.payload_bytes,
                workload.group_ranks(line.collective.role, rank),
                rank,
                hosts,
            )
            for rank in range(8)
        ]
        assert line.between_bytes == pytest.approx(sum(traffic.between for traffic in every) / 8)
        assert line.sent_bytes == pytest.approx(
            sum(traffic.between + traffic.inside for traffic in every) / 8
        )


@pytest.mark.parametrize(("role", "share"), [("world", 2 / 16), ("shard", 0.0), ("replica", 1.0)])
def test_shares_of_a_hybrid_that_shards_within_nodes(role: Role, share: float) -> None:
    found = states(backends="fsdp-hybrid", world_sizes=(16,), per_node=8)
    workload: Workload = found.scenario.workload()
    assert crossing_share(workload, role) == share


def test_one_rank_sends_nothing() -> None:
    found = states(backends="fsdp", world_sizes=(1,))
    assert found.scenario is not None
    assert step_traffic(found.scenario) == []
    assert found.sent_bytes == 0


def test_one_node_sends_nothing_to_others() -> None:
    found = states(backends="fsdp", world_sizes=(8,))
    assert found.between_bytes == 0 < found.sent_bytes


def test_accumulation_multiplies_what_is_gathered() -> None:
    once = states("training.micro_batch_size=1", MIXED, backends="fsdp")
    twice = states("training.micro_batch_size=1", "training.accumulation_steps=2", MIXED, backends="fsdp")
    gathered = [
        sum(line.sent_bytes for line in found.traffic if line.collective.op == "all_gather")
        for found in (once, twice)
    ]
    assert gathered[1] == pytest.approx(2 * gathered[0])


def test_zero3_without_a_closed_form_gathers_and_reduces_in_every_micro_step() -> None:
    def sent(steps: int, preset: str) -> float:
        given = (MIXED, f"runtime.preset={preset}", f"training.accumulation_steps={steps}")
        row = states(*given, "training.micro_batch_size=1", model="llama-3.2-1b", backends="zero3")
        return sum(line.sent_bytes for line in row.traffic)

    assert sent(4, "library-defaults") == pytest.approx(4 * sent(1, "library-defaults"))
    # Like for like it has a closed form, which the contract tests hold against runs.
    assert sent(4, "like-for-like") == pytest.approx(4 * sent(1, "like-for-like"), rel=1e-3)


def test_what_stages_and_rings_pass_on_is_sent_whole() -> None:
    given = ("training.micro_batch_size=4", "data.sequence_length=64")
    for backend, op in (("pp:stages=2,micro_batches=4", "send"), ("fsdp-cp:sequence=2", "permute")):
        row = states(*given, model="llama-3.2-1b", backends=backend)
        lines = [line for line in row.traffic if line.collective.op == op]
        assert lines
        for line in lines:
            assert line.sent_bytes == line.collective.payload_bytes
            assert line.formula.startswith(f"all {line.collective.payload_bytes:,} bytes")
