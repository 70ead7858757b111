"""What a rank tells of collectives, from the records of torch's recorders."""

from typing import Any

from harness.rank.process.start import merged
from harness.snapshots.flight_recorder import dump_of

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


def recorded(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"entries": list(entries), "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}}}


def oldest(*documents: dict[str, Any]) -> str | None:
    """The collective that waits, of one document per transport."""
    waits = dump_of(merged(documents), 0).open
    return waits[0].words if waits else None


def test_the_recorder_that_has_collectives_is_read_whichever_it_is() -> None:
    waits = entry("nccl", "_all_gather_base", 2, ended=False)
    seen = recorded(entry("nccl", "all_reduce", 1, ended=True), waits)
    said = "nccl _all_gather_base number 2 of group 0, default_pg (4x2 Float)"
    assert oldest(EMPTY, seen) == oldest(seen, EMPTY) == oldest(seen) == said
    assert oldest() is oldest(EMPTY, EMPTY) is None


def test_of_two_transports_the_oldest_collective_that_waits_is_told() -> None:
    gloo = recorded(entry("gloo", "barrier", 3, ended=False, at=900))
    nccl = recorded(entry("nccl", "all_reduce", 5, ended=False, at=800))
    assert str(oldest(gloo, nccl)).startswith("nccl all_reduce number 5")
    over = recorded(entry("nccl", "all_reduce", 5, ended=True))
    assert str(oldest(gloo, over)).startswith("gloo barrier number 3")


def test_who_gives_a_peer_up_waited_in_the_last_collective_where_none_is_open() -> None:
    """gloo retires one that timed out."""
    calls = [entry("gloo", op, n, ended=True) for n, op in enumerate(("all_reduce", "barrier"), start=1)]
    assert oldest(recorded(*calls)) is None
    (wait,) = dump_of(merged([EMPTY, recorded(*calls)], gives_up=True), 0).open
    assert wait.operation == "gloo barrier"
    calls = [entry("gloo", "all_reduce", 3, ended=False), entry("gloo", "barrier", 4, ended=True)]
    assert not merged([], gives_up=True)["entries"]
    assert [e["retired"] for e in merged([recorded(*calls)], gives_up=True)["entries"]] == [False, True]


def test_stacks_are_kept_of_what_waits_and_of_the_latest() -> None:
    calls = [entry("gloo", "barrier", n, ended=n > 1) | {"frames": [{"name": "f"}]} for n in range(1, 99)]
    with_stack = [e["collective_seq_id"] for e in merged([recorded(*calls)])["entries"] if "frames" in e]
    assert with_stack == [1, *range(49, 99)]


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
    assert oldest(recorded(*ended)) is None
    assert str(oldest(recorded(*ended, *waits))).startswith("nccl recv 0<-1 number 2 of group 0")
