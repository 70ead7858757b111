"""A run whose ranks no longer move: which rank did not arrive, and where each of them is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.files import write_atomically
from harness.record import ErrorPart, Part, RankStatePart
from harness.run_directory.rank_state import RankState, read_modules, read_part, read_state, shown_text

STUCK_NAME = "stuck.json"
REMEDY = (
    "have every rank run it, on zero rows where it has none, or run ddp:find_unused_parameters=true; with "
    "model.block_class for the module that holds it, zero3:leaf_module=blocks or fsdp1"
)
"""Of ranks that run different modules: only some gather the weights, or have the gradients. A unit that every
rank runs has gradients of zeros under these (torch 2.13, DeepSpeed 0.19.8)."""
MOST_RANKS_SHOWN = 32
"""Ranks whose states a record keeps; those at fault first."""
ORDER = ("start", "rendezvous", "load data", "setup", "data", "forward", "backward", "step")

_MEETING = re.compile(r"[^\n]*\n\s*File \"[^\"\n]*torch/distributed/(?:distributed_c10d|rendezvous)\.py\"")
"""The innermost frame of a rank that waits for others at the store: no collective is recorded then."""


class StuckNote(Part):
    """What whoever watches the ranks noted when they had to be ended."""

    kind: Literal["Stuck", "Timeout"] = "Stuck"
    """Whether they stood still, or took too long."""
    reason: str
    """Why they were ended, without its end."""
    stopped_ranks: list[int] = []
    """Whose processes were stopped (SIGSTOP): they can say nothing."""
    gone_ranks: list[int] = []
    """Whose processes had ended unfinished before the others were asked: a network may tell no peer of it."""
    unseen_ranks: list[int] = []
    """Whose nodes have a runs folder of their own: where they were is not known."""

    def write(self, run_directory: Path) -> None:
        write_atomically(run_directory / STUCK_NAME, self.model_dump_json())


@dataclass(frozen=True, kw_only=True)
class Late:
    """The ranks that the others wait for, and how that is known."""

    ranks: tuple[int, ...]
    why: str


def read_note(run_directory: Path) -> StuckNote | None:
    """What was noted; None: the ranks did not have to be ended."""
    return read_part(run_directory / STUCK_NAME, StuckNote)


def rank_states(run_directory: Path, world_size: int) -> list[RankStatePart]:
    """Where each rank was last, of runs that ended without being asked; the first 32 ranks."""
    shown = range(min(world_size, MOST_RANKS_SHOWN))
    return [_state_part(rank, read_state(run_directory, rank), "") for rank in shown]


def stuck_error(run_directory: Path, world_size: int, note: StuckNote) -> ErrorPart:
    """What a record says of ranks that had to be ended."""
    states = {rank: read_state(run_directory, rank) for rank in range(world_size)}
    seen = {rank: state for rank, state in states.items() if rank not in note.unseen_ranks}
    late = late_ranks(seen, note.stopped_ranks, note.gone_ranks)
    parted = parting(run_directory, world_size)
    rank = late.ranks[0] if late is not None else None
    at_fault = states[rank].position if rank is not None else None
    order = sorted(states, key=lambda r: (late is None or r not in late.ranks, r))
    return ErrorPart(
        kind=note.kind,
        message="; ".join([note.reason, *filter(None, [parted]), *_sentences(late, seen, note.unseen_ranks)]),
        rank=rank,
        **ErrorPart.shared(at_fault),
        ranks=[_part(r, states[r], note) for r in sorted(order[:MOST_RANKS_SHOWN])],
    )


def parting(run_directory: Path, world_size: int) -> str | None:
    """Where the modules that ranks run in one of the first steps part, and what to do; None: nowhere."""
    noted = {rank: read_modules(run_directory, rank) for rank in range(world_size)}
    runs = {rank: names for rank, names in noted.items() if names}
    names = next((names for names in zip(*runs.values(), strict=False) if len(set(names)) > 1), None)
    if names is None:
        return None
    for name in dict.fromkeys(names):
        if idle := [rank for rank, of_rank in runs.items() if name not in of_rank]:
            at_work = [rank for rank, of_rank in runs.items() if name in of_rank]
            where = f"module '{name}' runs on rank {_named(at_work)} and not on rank {_named(idle)}"
            break
    else:
        (first, one), (second, other) = list(dict(zip(names, runs, strict=True)).items())[:2]
        where = f"rank {one} runs module '{first}' where rank {other} runs '{second}'"
    return f"{where}; {REMEDY}"


def late_ranks(
    states: Mapping[int, RankState], stopped: Sequence[int], gone: Sequence[int] = ()
) -> Late | None:
    """The ranks that did not arrive where the others wait; None: that cannot be told.

    In this order: processes that have ended, processes that are stopped, ranks in a factory of the job and in
    no collective while others are elsewhere, ranks in no collective while others wait in one, ranks outside
    of torch.distributed while others wait in it, ranks that have begun fewer collectives, and ranks in an
    earlier step or phase.
    """
    if gone:
        return Late(ranks=tuple(gone), why="gone before it finished")
    if stopped:
        return Late(ranks=tuple(stopped), why="stopped by SIGSTOP")
    waiting = [rank for rank, state in states.items() if state.collective is not None]
    within = tuple(rank for rank, state in states.items() if _doing(state) and rank not in waiting)
    if within and len(within) < len(states):
        return Late(ranks=within, why="in code of the job's own, which has not returned")
    others = tuple(rank for rank in states if rank not in waiting)
    if waiting and others:
        return Late(ranks=others, why="in no collective, while others wait in one")
    meeting = [rank for rank, state in states.items() if _MEETING.match(state.stack)]
    if not waiting and meeting and len(meeting) < len(states):
        absent = tuple(rank for rank in states if rank not in meeting)
        return Late(ranks=absent, why="elsewhere, while others wait to form a process group")
    if waiting and all(states[rank].enqueued for rank in states):
        begun = {rank: sum(state.enqueued.values()) for rank, state in states.items()}
        if len(set(begun.values())) > 1:
            fewest = tuple(rank for rank, count in begun.items() if count == min(begun.values()))
            return Late(ranks=fewest, why="behind the others in the order of collectives")
        return None
    places = {rank: _place(state) for rank, state in states.items()}
    known = [place for place in places.values() if place is not None]
    if not known or len(set(known)) == 1:
        return None
    return Late(ranks=tuple(r for r, place in places.items() if place == min(known)), why="behind the others")


def _doing(state: RankState) -> str | None:
    return state.position.doing if state.position is not None else None


def _place(state: RankState) -> tuple[int, int] | None:
    position = state.position
    if position is None:
        return None
    if position.phase not in ORDER:
        return None
    return (-1 if position.step is None else position.step), ORDER.index(position.phase)


def _sentences(late: Late | None, states: Mapping[int, RankState], unseen: Sequence[int]) -> list[str]:
    waits = [(rank, state.collective) for rank, state in states.items() if state.collective is not None]
    if late is None and unseen:
        said = [f"rank {_named(unseen)} may be at fault: on other nodes, whose runs folder cannot be seen"]
    elif late is None and len({collective for _, collective in waits}) > 1:
        said = ["the ranks wait in different collectives"]
    elif late is None and len(waits) == len(states):
        said = ["all ranks wait in the same collective: a broken network, or an overloaded machine"]
    elif late is None and (within := [state for state in states.values() if _doing(state)]):
        said = [f"code of the job's own has not returned ({_where(within[0])})"]
    elif late is None:
        said = ["no rank is behind the others"]
    else:
        verb = "is" if len(late.ranks) == 1 else "are"
        said = [f"rank {_named(late.ranks)} {verb} {late.why} ({_where(states[late.ranks[0]])})"]
    said += [f"rank {rank} waits in {collective}" for rank, collective in waits[:2]]
    return said


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def _where(state: RankState) -> str:
    if state.position is None:
        return "not yet started"
    step = f"step {state.position.step}, " if state.position.step is not None else ""
    doing = f", in {state.position.doing}" if state.position.doing else ""
    return f"{step}{state.position.phase}{doing}"


def _part(rank: int, state: RankState, note: StuckNote) -> RankStatePart:
    said = ""
    if rank in note.stopped_ranks:
        said = "the process was stopped (SIGSTOP), so it could not write its stacks"
    elif rank in note.gone_ranks:
        said = "the process had ended"
    elif rank in note.unseen_ranks:
        said = "its node has a runs folder of its own, which cannot be seen"
    elif not state.stack:
        said = "the process did not write its stacks when asked"
    return _state_part(rank, state, said)


def _state_part(rank: int, state: RankState, said: str) -> RankStatePart:
    return RankStatePart(
        rank=rank,
        **RankStatePart.shared(state.position),
        collective=state.collective,
        stack=shown_text(state.stack),
        note=said,
    )
