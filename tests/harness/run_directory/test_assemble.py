"""A failed run names the rank that ended first by itself, however it ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.record import ObservedPart
from harness.run_directory import events
from harness.run_directory.assemble import interrupted_error, otherwise, run_environment, write_node
from harness.run_directory.rank_state import (
    HEAD_BYTES,
    ModuleWriter,
    StuckNote,
    parting,
    read_modules,
    stuck_error,
)
from harness.run_directory.request import DESCRIPTION, SavedCheckpoint, modules_file, rank_file, rank_state
from harness.snapshots.flight_recorder import KEPT
from tests.fake_ranks import STEP, Behaviour, Rank, failure_of, has_ended, record_of
from tests.harness.run_directory.test_events import setup_event
from tests.patience import until
from tests.records import make_effective


def survive(rank: Rank) -> None:
    rank.train()
    rank.miss_a_peer()


def failing(*words: str, **values: str) -> Behaviour:
    def behave(rank: Rank) -> None:
        rank.train()
        rank.fail(*words, **values)

    return behave


def leave(code: int) -> Behaviour:
    def behave(rank: Rank) -> None:
        rank.train()
        os._exit(code)

    return behave


def killed(number: signal.Signals) -> Behaviour:
    def behave(rank: Rank) -> None:
        rank.train()
        os.kill(os.getpid(), number)
        time.sleep(10)

    return behave


def silent_failure(rank: Rank) -> None:
    """As an exception whose text raises, or a full event file: an exit code and no event."""
    rank.train()
    sys.exit(1)


@pytest.mark.parametrize(
    ("behaviour", "code", "said"),
    [
        (leave(0), 0, "exit code 0 before it finished"), (leave(5), 5, "exit code 5"),
        (leave(74), 74, "could not write its events"), (killed(signal.SIGKILL), -9, "SIGKILL"),
        (killed(signal.SIGSEGV), -11, "SIGSEGV"), (killed(signal.SIGTERM), 143, "SIGTERM"),
        (silent_failure, 1, "exit code 1"),
    ],
    ids=["exit-0", "exit-5", "events-lost", "SIGKILL", "SIGSEGV", "SIGTERM", "silent"],
)  # fmt: skip
@pytest.mark.parametrize("at_fault", [0, 1])
def test_rank_that_left_is_blamed_and_not_the_one_that_misses_it(
    tmp_path: Path, behaviour: Behaviour, code: int, said: str, at_fault: int
) -> None:
    behaviours = [survive, survive]
    behaviours[at_fault] = behaviour
    record, error = failure_of(tmp_path, *behaviours)
    assert record.status == "failed"
    assert (error.rank, error.exit_code, error.kind) == (at_fault, code, "Exit")
    assert said in error.message
    assert (error.step, error.phase) == (2, "forward")
    assert len(record.steps) == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.unlink(), "rank-00001.jsonl, the rank's events, is missing; the rank ended"),
        (lambda file: file.open("a").write("[["), "lines of rank-00001.jsonl cannot be read (1), its last"),
        (lambda file: [(state := file.with_suffix(".state")).unlink(), os.mkfifo(state)], None),
    ],
    ids=["missing", "garbage", "pipe"],
)  # fmt: skip
def test_damaged_files_of_a_rank_are_named_and_no_pipe_is_waited_for(
    tmp_path: Path, damage: Callable[[Path], object], said: str | None
) -> None:
    def is_damaged(rank: Rank) -> None:
        rank.train()
        damage(rank_file(tmp_path, 1))
        time.sleep(1)
        rank.done()

    record = record_of(tmp_path, lambda rank: (rank.train(), rank.done()), is_damaged)
    assert (record.status, record.error and record.error.message.startswith(said)) == (
        ("ok", None) if said is None else ("failed", True)
    )


def test_exception_of_a_rank_counts_before_the_abort_of_its_peer(tmp_path: Path) -> None:
    def abort(rank: Rank) -> None:
        rank.train()
        rank.outlive_a_peer(0.3)
        os.abort()

    _, error = failure_of(tmp_path, abort, failing("the data are odd", "ValueError"))
    assert (error.rank, error.kind, error.message) == (1, "ValueError", "the data are odd")
    assert (error.step, error.phase) == (2, "backward")


def test_children_of_a_rank_end_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def with_child(rank: Rank) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pid.write_text(str(child.pid))
        rank.train()
        os._exit(5)

    record_of(tmp_path, survive, with_child)
    until(lambda: has_ended(int(pid.read_text())))


def refuse(rank: Rank) -> None:
    rank.position.enter("setup")
    rank.events.write(events.UnsupportedEvent(reasons=["no plan for it"]))
    os._exit(0)


def test_a_refusal_counts_before_the_peers_that_miss_the_rank(tmp_path: Path) -> None:
    record = record_of(tmp_path, refuse, lambda rank: rank.miss_a_peer())
    assert (record.status, record.reasons, record.error) == ("unsupported", ["no plan for it"], None)


def test_a_failure_of_its_own_is_not_hidden_by_another_rank_s_refusal(tmp_path: Path) -> None:
    record, error = failure_of(tmp_path, refuse, failing("the data are odd", "ValueError"))
    assert (record.status, error.message) == ("failed", "the data are odd")


def aborted_by_the_watchdog(rank: Rank) -> None:
    """As NCCL's watchdog ends a rank whose peer is gone."""
    rank.train()
    rank.outlive_a_peer(0.2)
    rank.log.write_text("[rank0]:[E ProcessGroupNCCL.cpp:2068] Process group watchdog thread terminated\n")
    os.abort()


def aborted_out_of_memory(rank: Rank) -> None:
    """As a thread of NCCL that finds no memory ends the process."""
    rank.train()
    time.sleep(0.1)
    rank.log.write_text(
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  NCCL error: unhandled cuda error, Failed to CUDA calloc async 608 bytes\n"
    )
    os.abort()


@pytest.mark.parametrize(
    "behaviour",
    [
        failing("CUDA out of memory. Tried to allocate 20.00 MiB.", "OutOfMemoryError", status="oom"),
        aborted_out_of_memory,
    ],
)
@pytest.mark.parametrize("at_fault", [0, 1])
def test_a_rank_out_of_memory_is_blamed_and_not_the_peer_that_the_watchdog_aborts(
    tmp_path: Path, behaviour: Behaviour, at_fault: int
) -> None:
    behaviours = [aborted_by_the_watchdog, aborted_by_the_watchdog]
    behaviours[at_fault] = behaviour
    record, error = failure_of(tmp_path, *behaviours)
    assert (record.status, error.rank) == ("oom", at_fault)


MISMATCH = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at "
    "pair.cc:456] op.preamble.length <= op.nbytes. 37088 vs 4. Received data size "
    "doesn't match expected size."
)


def abort(rank: Rank) -> None:
    rank.train()
    rank.log.write_text(MISMATCH)
    os.kill(os.getpid(), signal.SIGABRT)


@pytest.mark.parametrize("notice", [abort, failing(MISMATCH)])
def test_rank_that_notices_a_disagreement_is_not_blamed_for_it(tmp_path: Path, notice: Behaviour) -> None:
    record, error = failure_of(tmp_path, survive, notice)
    assert (record.status, error.kind, error.rank) == ("failed", "CollectiveMismatch", None)
    assert "rank 1 received 37088 bytes where it waited for 4" in error.message
    assert [(part.rank, part.step, part.phase) for part in error.ranks] == [
        (0, 2, "backward"),
        (1, 2, "forward"),
    ]


DISAGREEMENT = "Detected a disagreement on list length between rank0 and rank1: \n rank0: 2 \n rank1: 3"


@pytest.mark.parametrize("notice", [abort, failing(DISAGREEMENT)])
def test_the_module_that_idles_on_a_rank_is_named_with_what_to_do(tmp_path: Path, notice: Behaviour) -> None:
    for rank, names in enumerate((["first", "experts.2", "experts.2.up"], ["first", "experts.1"])):
        writer = ModuleWriter(tmp_path, rank)
        writer.begin_step()
        for name in names:
            writer.note(name)
    record, error = failure_of(tmp_path, survive, notice)
    assert (record.status, error.kind) == ("failed", "CollectiveMismatch")
    assert error.message.startswith(
        "the ranks disagree on a collective: module 'experts.2' runs on rank 0 and not on rank 1; have every "
        "rank run it, on zero rows where it has none, or run ddp:find_unused_parameters=true; with "
        "model.block_class for the module that holds it, zero3:leaf_module=blocks or fsdp1; rank 1 "
    )


AHEAD = "module 'h' runs 2 times on rank 0 and 1 time on rank 1, which runs 'z' then; "


@pytest.mark.parametrize(
    ("of_ranks", "said"),
    [
        (["abc", "ab", "abc"], None),  # one is ahead
        (["", "ab"], None),
        (["xyzw", "xyw", "xyzw"], "module 'z' runs on rank 0, 2 and not on rank 1; "),
        (["xabyb", "xabya"], "rank 0 runs module 'b' where rank 1 runs 'a'; "),
        (["ahhz", "ahz"], AHEAD),
        (["ahh", "ahz"], AHEAD),  # stuck in it
        (["ahzahhz", "ahzahz"], AHEAD),  # a later micro-step
        (["anhnhz", "anhnhnh", "anhnhz"], "module 'n' runs 3 times on rank 1 and 2 times on rank 0, 2, "),
    ],
)
def test_ranks_part_where_they_run_other_modules_or_one_more_often(
    tmp_path: Path, of_ranks: list[str], said: str | None
) -> None:
    for rank, names in enumerate(of_ranks):
        modules_file(tmp_path, rank).write_text("".join(f"{name}\n" for name in names))
    found = parting(tmp_path, len(of_ranks))
    assert (found is None) == (said is None)
    assert str(found).startswith(str(said))
    if "times" in str(said):
        assert "; have every rank call it as often" in found
        assert found.endswith("or run ddp, zero1 or zero2, which gather no weights in passes")


def test_a_step_that_is_over_leaves_no_note(tmp_path: Path) -> None:
    writer = ModuleWriter(tmp_path, 0)
    writer.begin_step()
    writer.note("first")
    assert read_modules(tmp_path, 0) == ["first"]
    writer.begin_step()
    assert read_modules(tmp_path, 0) == []
    writer.end()
    assert not modules_file(tmp_path, 0).exists()


def write_waiting(folder: Path, rank: int) -> None:
    """The state of a rank that waits in a collective."""
    head = "2 backward".ljust(HEAD_BYTES - 1) + "\n"
    rank_state(folder, rank).write_text(head + 'collectives: {"pending": "gloo all_reduce number 41"}\n')


def test_a_rank_that_cannot_be_seen_is_not_blamed_by_one_that_waits(tmp_path: Path) -> None:
    write_waiting(tmp_path, 0)
    seen = stuck_error(tmp_path, 2, StuckNote(reason="no rank moved"))
    unseen = stuck_error(tmp_path, 2, StuckNote(reason="no rank moved", unseen_ranks=[1]))
    assert (seen.rank, unseen.rank) == (1, None)
    assert "rank 1 may be at fault" in unseen.message


def test_an_interrupted_run_whose_ranks_stood_still_says_where_they_wait(tmp_path: Path) -> None:
    write_waiting(tmp_path, 0)
    assert interrupted_error(tmp_path, 2, 3).message == "interrupted by the user after 3 steps"
    rank_state(tmp_path, 1).write_text(" " * HEAD_BYTES + 'collectives: {"pending": null}\n')
    error = interrupted_error(tmp_path, 2, 3)
    assert (error.kind, error.rank) == ("Interrupted", 1)
    assert "rank 1 is in no collective, while others wait in one" in error.message
    assert error.message.endswith("rank 0 waits in gloo all_reduce number 41")


def giving_up(collective: str) -> Behaviour:
    def behave(rank: Rank) -> None:
        rank.train()
        rank.position.enter("backward")
        with rank_state(rank.folder, int(rank.log.stem[-5:])).open("a") as file:
            file.write(f"collectives: {json.dumps({'pending': collective})}\n")
        rank.fail("Timed out waiting 1000ms for recv operation to complete")

    return behave


def test_the_only_rank_that_says_what_it_waits_in_is_heard(tmp_path: Path) -> None:
    _, error = failure_of(tmp_path, giving_up("gloo all_reduce number 41"), killed(signal.SIGABRT))
    assert error.message.endswith("; rank 0 waits in gloo all_reduce number 41")
    _, error = failure_of(tmp_path, giving_up("gloo all_reduce number 41"), failing("odd data", "ValueError"))
    assert (error.message, error.ranks) == ("odd data", [])


def test_ranks_in_different_collectives_are_told_apart_by_their_recorders(tmp_path: Path) -> None:
    for rank, name in enumerate(("broadcast", "broadcast", "barrier")):
        call = {"profiling_name": f"gloo:{name}", "collective_seq_id": 7, "process_group": ["0", ""]}
        rank_state(tmp_path, rank).write_text(" " * HEAD_BYTES + f'collectives: {{"pending": "{name}"}}\n')
        (tmp_path / KEPT.replace("*", f"{rank:05d}")).write_text(json.dumps({"entries": [call]}))
    error = stuck_error(tmp_path, 3, StuckNote(reason="no rank moved"))
    assert error.rank == 2
    assert error.message.startswith(
        "no rank moved; rank 2 is in another collective, in gloo barrier number 7"
    )


def test_all_in_the_same_collective_is_no_rank_s_fault(tmp_path: Path) -> None:
    for rank in range(2):
        write_waiting(tmp_path, rank)
    error = stuck_error(tmp_path, 2, StuckNote(reason="no rank moved"))
    assert error.rank is None
    assert "all ranks wait in the same collective" in error.message


def rank(rates: tuple[float | None, ...] = (), scale: float | None = None, **seen: Any) -> events.RankEvents:
    effective = make_effective(**seen.pop("effective", {}))
    steps = [
        events.StepEvent(step=step, seconds=1.0, applied_learning_rate=rate, **STEP)
        for step, rate in enumerate(rates)
    ]
    in_force = seen.pop("in_force", {})
    final = events.FinalEvent(
        weights=None, observed=ObservedPart(**seen), probe_loss=None, loss_scale=scale, in_force=in_force
    )
    return events.RankEvents(setup=setup_event(effective), steps=steps, final=final)


@pytest.mark.parametrize(
    ("mine", "first", "found"),
    [
        ({"rates": (0.1, 0.2)}, {"rates": (0.1, 0.1)}, {"learning rate of step 1": [0.2, 0.1]}),
        ({"rates": (0.1, None)}, {"rates": (0.1, 0.1)}, {}),
        ({"scale": 2.0}, {"scale": 4.0}, {"loss scale after the training": [2.0, 4.0]}),
        ({"tf32": True}, {"tf32": False}, {"tf32": [True, False]}),
        ({"optimizer_steps": 5}, {"optimizer_steps": 6}, {"optimizer steps": [5, 6]}),
        ({"optimizer_steps": None}, {"optimizer_steps": 6}, {}),
        ({"master_dtypes": []}, {"master_dtypes": ["float32"]}, {}),
        (
            {"optimizer_groups": [{"eps": 2}], "constants_by_step": {0: [{"eps": 1}], 3: [{"eps": 2}]}},
            {"optimizer_groups": [{"eps": 1}]},
            {"eps of optimizer group 0, changed in step 3": [2, 1]},
        ),
        (
            {"in_force": {"gradient_clipping": 0.5, "optimizer": "a"}},
            {"in_force": {"gradient_clipping": 1.0, "optimizer": "a"}},
            {"gradient clipping after the training": [0.5, 1.0]},
        ),
        (
            {"effective": {"gradient_clipping": None}},
            {"effective": {"gradient_clipping": 1.0}},
            {"gradient clipping": [None, 1.0]},
        ),
        (
            {"effective": {"gradient_clipping": 0.5}},
            {"effective": {"gradient_clipping": 1.0}},
            {"gradient clipping": [0.5, 1.0]},
        ),
        (
            {"optimizer_groups": [{"weight_decay": 0.1, "parameters": ["a"]}]},
            {"optimizer_groups": [{"weight_decay": 0.0, "parameters": ["a", "b"]}]},
            {
                "weight_decay of optimizer group 0": [0.1, 0.0],
                "parameters of optimizer group 0": [[], ["b"]],
            },
        ),
        (
            {"optimizer_groups": [{"eps": 1}, {"eps": 1}]},
            {"optimizer_groups": [{"eps": 1}]},
            {"groups of the optimizer": [2, 1]},
        ),
        ({"training_in_evaluation": ["drop"]}, {"training_in_evaluation": []},
         {"training in evaluation": [["drop"], []]}),
    ],
)  # fmt: skip
def test_a_difference_is_told_with_both_values(mine: Any, first: Any, found: Any) -> None:
    assert otherwise(rank(**mine), rank(**first), whole_model=True) == found


def test_stages_agree_in_what_a_process_has_alone_and_who_ended_early_in_what_is_known() -> None:
    mine, first = rank(tf32=True, optimizer_steps=5), rank(tf32=False, optimizer_steps=6)
    assert otherwise(mine, first, whole_model=False) == {"tf32": [True, False]}
    first = rank((0.1, 0.1))
    assert otherwise(first, first, whole_model=True) == {}
    ended = events.RankEvents(steps=rank((0.2,)).steps)
    assert otherwise(ended, first, whole_model=True) == {"learning rate of step 0": [0.2, 0.1]}


def clipped(squares: float, share: float, norm: float = 2.0) -> events.RankEvents:
    rank_events = rank((0.1,))
    applied = events.AppliedGradients(squares=squares, share=share)
    steps = [row.model_copy(update={"applied": applied, "gradient_norm": norm}) for row in rank_events.steps]
    return events.RankEvents(setup=rank_events.setup, steps=steps, final=rank_events.final)


def test_a_rank_that_clips_otherwise_is_told_and_is_no_norm_of_all() -> None:
    mine, first = clipped(0.01, 1.0), clipped(1.0, 1.0)
    told = {"norm of the clipped gradient of step 0": [0.1, 1.0]}
    assert otherwise(mine, first, whole_model=True) == told
    (step,) = events.steps_of({0: first, 1: mine})
    assert step.applied_gradient_norm is None


def test_parts_of_a_gradient_and_gradients_that_were_never_reduced_are_not_clipped_otherwise() -> None:
    for mine, first in (
        (clipped(0.64, 0.5), clipped(0.36, 0.5)),
        (clipped(0.01, 1.0, 0.1), clipped(1.0, 1.0)),
    ):
        assert otherwise(mine, first, whole_model=True) == {}
    for squares, share, norm in ((0.64, 0.5, 1.0), (0.4, 0.3, None)):  # seen whole, and in part
        (step,) = events.steps_of({0: clipped(0.36, 0.5), 1: clipped(squares, share)})
        assert step.applied_gradient_norm == norm


def test_a_node_says_when_the_run_began_on_it(tmp_path: Path) -> None:
    """A scheduler begins it long after it was asked for."""
    assert run_environment(tmp_path).started_at is None
    write_node(tmp_path, 0)
    found = run_environment(tmp_path)
    assert found.started_at is not None
    assert abs((datetime.now(UTC) - datetime.fromisoformat(found.started_at)).total_seconds()) < 60
    assert len(found.nodes) == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 3}', b"\xff\xfe", b'{"schema_version": 2}'])
def test_damage_is_one_line_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_bytes(content)
    with pytest.raises(HarnessError, match=f"{DESCRIPTION}' is damaged, or of another version") as raised:
        SavedCheckpoint.read(tmp_path)
    assert "\n" not in str(raised.value)
