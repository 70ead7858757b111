"""What is asked of a simulated rank, and its figures next to those of closed forms."""

from typing import Any

import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.launch.launcher import LocalLauncher
from harness.plan.simulation import (
    SimulatedRow,
    as_json,
    compare_with_closed_forms,
    plan_simulation,
    row_lines,
    run_simulations,
    simulated_peaks,
    with_model,
)
from harness.rank.job_check import check_job
from harness.record import CommunicationPart, MemoryPart
from harness.run_directory.request import SimulatedRank, SimulationRequest
from harness.tell.formats import WIDTH

RANKS, PER_NODE, PAYLOAD = 16, 8, 1600


@pytest.fixture(scope="module")
def asked() -> SimulationRequest:
    return plan_simulation(load_experiment(None), "fsdp-hybrid", RANKS, ranks_per_node=PER_NODE, rank=3)


@pytest.fixture(scope="module")
def facts(asked: SimulationRequest) -> dict[str, Any]:
    return check_job(asked.run.job)


def counted(op: str, ranks: list[int], role: str, phase: str = "backward") -> CommunicationPart:
    return CommunicationPart(
        rank=3, phase=phase, op=op, dtype="float32", group=role, group_ranks=ranks, group_size=len(ranks),
        calls=2, payload_bytes=PAYLOAD, role=role,  # type: ignore[arg-type]
    )  # fmt: skip


def moment(name: str, peak: int, kinds: dict[str, int] | None = None) -> MemoryPart:
    return MemoryPart(step=2, moment=name, allocated_bytes=1, peak_bytes=peak, kinds=kinds)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def row(asked: SimulationRequest, facts: dict[str, Any]) -> SimulatedRow:
    result = SimulatedRank(
        status="ok", tensors="fake", versions={"torch": "2.13"}, model=facts["model"],
        layout=facts["layout"], configuration=facts["configuration"],
        communication=[
            counted("all_gather", list(range(8)), "shard"),
            counted("all_reduce", [3, 11], "replica"),
            counted("all_gather", list(range(RANKS)), "world", phase="forward"),
        ],
        memory=[
            moment("after_setup", 900),
            moment("after_forward", 500),
            moment("after_backward", 700, {"weights": 10, "gradients": 20, "other": 5}),
            moment("after_step", 600),
        ],
    )  # fmt: skip
    return compare_with_closed_forms(asked, result)


def test_bytes_leave_a_node_where_the_next_rank_of_a_ring_is_elsewhere(row: SimulatedRow) -> None:
    sent = {(c.role, c.op): (c.sent_bytes, c.node_sent_bytes) for c in row.collectives if c.calls}
    # Shard groups are nodes. Every rank's replica is on the other node: all eight send across.
    assert sent["shard", "all_gather"] == (PAYLOAD * 7 / 8, 0)
    assert sent["replica", "all_reduce"] == (PAYLOAD, 8 * PAYLOAD)
    # A ring over all ranks leaves each node once.
    assert sent["world", "all_gather"] == (PAYLOAD * 15 / 16, PAYLOAD * 15 / 16)


def test_collectives_that_only_the_closed_form_has_are_rows_without_calls(row: SimulatedRow) -> None:
    (missing,) = (c for c in row.collectives if c.op == "reduce_scatter")
    assert (missing.calls, missing.payload_bytes, missing.group_size) == (0, 0, 8)
    assert missing.expected_calls == 5
    assert missing.expected_payload_bytes > 0
    (surplus,) = (c for c in row.collectives if c.role == "world")
    assert (surplus.expected_calls, surplus.expected_payload_bytes) == (0, 0)


def test_states_and_peaks_have_their_prediction(row: SimulatedRow) -> None:
    states = {part.name: part.bytes for part in row.states}
    assert states == {"weights": 10, "gradients": 20, "optimizer": 0}
    assert all(part.expected_bytes for part in row.states)
    assert simulated_peaks(row.result) == {"after_forward": 500, "after_backward": 700, "after_step": 600}
    peaks = [(part.name, part.bytes) for part in row.peaks]
    assert peaks == [("forward/backward", 700), ("optimizer step", 600)]
    assert all(part.expected_bytes for part in row.peaks)
    assert row.peak_bytes == 700


def test_text_says_what_is_simulated_and_what_is_not(row: SimulatedRow) -> None:
    text = "\n".join(row_lines(row))
    assert text.startswith("fsdp-hybrid, rank 3 of 16 (2 nodes of 8): LlamaForCausalLM, ")
    assert "simulated: the adapter's own code (torch 2.13) with tensors without data" in text
    assert "not simulated: time, the transport's buffers" in text
    table = text.split("\n\n")[1]
    assert "leaves" in table
    assert max(map(len, table.splitlines())) <= WIDTH


def test_what_cannot_be_simulated_is_a_row_with_the_reason(asked: SimulationRequest) -> None:
    failed = SimulatedRank(
        status="failed", reason="TypeError: no", tensors="fake", versions={"deepspeed": "0.19.8"}
    )
    row = compare_with_closed_forms(asked, failed)
    assert row_lines(row) == [
        "fsdp-hybrid, rank 3 of 16 (2 nodes of 8): unsupported: TypeError: no (deepspeed 0.19.8)"
    ]
    (document,) = as_json([row], "m")["rows"]
    assert (document["status"], document["peak_bytes"], document["collectives"]) == ("failed", None, [])


def test_a_batch_of_the_job_is_kept_and_without_one_the_micro_batch_is_one_sample() -> None:
    run = plan_simulation(load_experiment(None), "fsdp", 1024, ranks_per_node=8).run
    assert (run.micro_batch_size, run.accumulation_steps, run.ranks_per_node) == (1, 1, 8)
    assert (run.job.training.global_batch_size, run.nodes) == (1024, 128)
    experiment = load_experiment(None, ["training.global_batch_size=64", "training.accumulation_steps=2"])
    run = plan_simulation(experiment, "fsdp", 4, ranks_per_node=8).run
    assert (run.micro_batch_size, run.accumulation_steps, run.ranks_per_node) == (8, 2, 4)


def test_ranks_must_fill_nodes_and_the_rank_must_be_in_the_world() -> None:
    with pytest.raises(HarnessError, match=r"12 ranks do not fill nodes of 8"):
        plan_simulation(load_experiment(None), "fsdp", 12, ranks_per_node=8)
    with pytest.raises(HarnessError, match=r"rank 4 is not in a world of 4; give 0 to 3"):
        plan_simulation(load_experiment(None), "fsdp", 4, ranks_per_node=4, rank=4)


def test_another_model_keeps_the_rest_of_the_job() -> None:
    experiment = load_experiment(None, ["model.attention=eager", "data.sequence_length=64"])
    changed = with_model(experiment, {"model_type": "gpt2"})
    assert changed.model.config == {"model_type": "gpt2"}
    assert (changed.model.attention, changed.data.sequence_length) == ("eager", 64)


def test_a_rank_that_breaks_off_is_a_row_and_the_next_is_simulated_until_the_job_is_refused(
    asked: SimulationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(
        [
            HarnessError("the simulation failed with exit code -9"),
            SimulatedRank(status="unsupported", reason="four stages", tensors="fake").model_dump_json(),
            SimulatedRank(status="refused", reason="no tokens", tensors="fake").model_dump_json(),
        ]
    )

    def ask(*_: str) -> str:
        if isinstance(answer := next(answers), HarnessError):
            raise answer
        return answer

    monkeypatch.setattr(LocalLauncher, "ask", ask)
    results = run_simulations([asked] * 3)
    assert (first := next(results)).status == "failed"
    assert first.reason == "the simulation failed with exit code -9"
    assert next(results).reason == "four stages"
    with pytest.raises(HarnessError, match="no tokens"):
        next(results)
