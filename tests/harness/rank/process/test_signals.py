"""What a rank tells of collectives, from the records of torch's recorders."""

from __future__ import annotations

from typing import Any

from harness.rank.process.start import summarise

EMPTY = {"comm_lib_version": "", "pg_config": {}, "pg_status": {}, "version": "2.10"}
"""gloo's, in a run over NCCL."""


def entry(
    transport: str, op: str, number: int, *, ended: bool, p2p: bool = False, at: int = 0
) -> dict[str, Any]:
    return {
        "collective_seq_id": 0 if p2p else number, "p2p_seq_id": number if p2p else 0, "is_p2p": p2p,
        "input_dtypes": ["Float"], "input_sizes": [[4, 2]], "process_group": ["0", "default_pg"],
        "profiling_name": f"{transport}:{op}", "retired": ended, "time_created_ns": at or number,
    }  # fmt: skip


def recorded(begun: int, *entries: dict[str, Any]) -> dict[str, Any]:
    return {"entries": list(entries), "pg_status": {"0": {"last_enqueued_collective": str(begun)}}}


def test_the_recorder_that_has_collectives_is_read_whichever_it_is() -> None:
    waits = entry("nccl", "_all_gather_base", 2, ended=False)
    seen = recorded(2, entry("nccl", "all_reduce", 1, ended=True), waits)
    said = {
        "pending": "nccl _all_gather_base number 2 of group 0, default_pg (4x2 Float)",
        "enqueued": {"0": 2},
    }
    assert summarise([EMPTY, seen]) == summarise([seen, EMPTY]) == summarise([seen]) == said
    assert summarise([]) == summarise([EMPTY, EMPTY]) == {"pending": None, "enqueued": {}}


def test_of_two_transports_the_oldest_collective_that_waits_is_told() -> None:
    gloo = recorded(3, entry("gloo", "barrier", 3, ended=False, at=900))
    nccl = recorded(5, entry("nccl", "all_reduce", 5, ended=False, at=800))
    summary = summarise([gloo, nccl])
    assert summary["pending"].startswith("nccl all_reduce number 5")
    assert summary["enqueued"] == {"0": 8}
    over = recorded(5, entry("nccl", "all_reduce", 5, ended=True))
    assert summarise([gloo, over])["pending"].startswith("gloo barrier number 3")


def test_parts_of_a_batch_that_ended_do_not_wait() -> None:
    """NCCL notes each of them without work: only the batch is ever told to have ended."""
    ended = [
        entry("nccl", "send 0->1", 1, ended=False, p2p=True),
        entry("nccl", "recv 0<-1", 1, ended=False, p2p=True),
        entry("nccl", "coalesced", 1, ended=True, p2p=True),
    ]
    waits = [
        entry("nccl", "recv 0<-1", 2, ended=False, p2p=True),
        entry("nccl", "coalesced", 2, ended=False, p2p=True),
    ]
    assert summarise([recorded(0, *ended)])["pending"] is None
    assert summarise([recorded(0, *ended, *waits)])["pending"].startswith(
        "nccl recv 0<-1 number 2 of group 0"
    )
