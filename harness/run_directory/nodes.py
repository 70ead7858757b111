"""What each node of a run is, and how ranks that torchrun started ended there, for whoever assembles it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from harness.files import write_atomically
from harness.record import EnvironmentPart, InterfacePart, NodePart, Part
from harness.record.provenance import environment
from harness.run_directory.assemble import Outcome
from harness.run_directory.events import RankEvents, SetupEvent, has_ended_well, has_said_its_end, read_events
from harness.run_directory.rank_state import Owner, read_part
from harness.run_directory.request import RankExit, RunRequest, rank_exit, rank_owner
from harness.run_directory.stuck import StuckNote

NETWORK = Path("/sys/class/net")


def node_file(run_directory: Path, node: int) -> Path:
    """Where the first rank of a node describes it."""
    return run_directory / f"node-{node:05d}.json"


def write_node(run_directory: Path, node: int) -> None:
    """Describe this machine for the record."""
    write_atomically(node_file(run_directory, node), describe_node().model_dump_json())


class NodeFile(Part):
    """What the first rank of a node writes."""

    environment: EnvironmentPart
    topology: NodePart


def read_nodes(run_directory: Path) -> list[NodeFile]:
    """What the nodes reported, in order; empty if the launcher knows its only node itself."""
    found = (read_part(path, NodeFile) for path in sorted(run_directory.glob("node-*.json")))
    return [node for node in found if node is not None]


def run_environment(run_directory: Path) -> EnvironmentPart:
    """The environment of a record: of the first node, with the topology of every node under 'nodes'."""
    nodes = read_nodes(run_directory)
    if not nodes:
        return environment()
    return nodes[0].environment.model_copy(update={"nodes": [node.topology for node in nodes]})


def environment_of(
    run_directory: Path, request: RunRequest, setup: SetupEvent | None, broken_event_lines: int
) -> EnvironmentPart:
    """The same with what request and ranks know of it."""
    more = {
        "broken_event_lines": broken_event_lines,
        "accelerator": setup.accelerator if setup else None,
        "launcher_settings": request.launcher_settings,
    }
    return run_environment(run_directory).model_copy(update=more)


def describe_node() -> NodeFile:
    """Environment of this machine, and how its processors, GPUs and networks are laid out."""
    facts = environment().model_copy(update={"started_at": datetime.now(UTC).isoformat(timespec="seconds")})
    topology = NodePart(
        host=socket.gethostname(),
        cpu=facts.cpu,
        cores=facts.cores,
        usable_cores=len(os.sched_getaffinity(0)),
        memory_bytes=facts.memory_bytes,
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        gpus=facts.gpus,
        gpu_topology=_gpu_topology(),
        interfaces=_interfaces(),
    )
    return NodeFile(environment=facts, topology=topology)


def _interfaces() -> list[InterfacePart]:
    """Network interfaces that are up, with their speed where the kernel knows one."""
    addresses = psutil.net_if_addrs()
    found = []
    for name, state in psutil.net_if_stats().items():
        if state.isup and name != "lo":
            own = [a.address for a in addresses.get(name, []) if a.family == socket.AF_INET]
            found.append(
                InterfacePart(
                    name=name,
                    addresses=own,
                    megabits_per_second=state.speed or None,
                    mtu_bytes=state.mtu,
                    infiniband=(NETWORK / name / "device" / "infiniband").exists(),
                )
            )
    return found


def _gpu_topology() -> list[str] | None:
    """Lines of `nvidia-smi topo -m`; None without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else None


PATIENCE_SECONDS = 2.0
"""Monitors note an end at once; a file system shows the note a little later."""
TOGETHER_SECONDS = 1.0
"""Ranks that were all told to end within this time were told by their launcher."""


def wait_for_ends(run_directory: Path, world_size: int) -> None:
    """Return when every rank has said or is known to have ended, or after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        # Last lines only: all events of 64 ranks and 1,000 steps take seconds to read.
        if all(has_said_its_end(run_directory, r) or _is_known(run_directory, r) for r in range(world_size)):
            return
        time.sleep(0.1)


def external_outcome(run_directory: Path, world_size: int) -> Outcome:
    """The exits that monitors noted, and which ranks vanished with their monitors."""
    notes = {rank: read_part(rank_exit(run_directory, rank), RankExit) for rank in range(world_size)}
    known = sorted((note.at, rank, note.exit_code) for rank, note in notes.items() if note is not None)
    events, _ = read_events(run_directory, world_size)
    vanished = frozenset(
        rank
        for rank, of_rank in events.items()
        if notes[rank] is None and not of_rank.has_ended and is_gone(run_directory, rank)
    )
    outcome = Outcome(
        exit_codes={rank: code for _, rank, code in known},
        ended_at={rank: at for at, rank, _ in known},
        vanished=vanished,
    )
    return Outcome(exit_codes={}, stopped="interrupted") if _told_to_end(events, outcome) else outcome


def is_gone(run_directory: Path, rank: int) -> bool:
    """Whether the monitor of a rank is known to have ended."""
    owner = read_part(rank_owner(run_directory, rank), Owner)
    return owner is not None and owner.is_gone


def has_gone(run_directory: Path, rank: int) -> bool:
    """Whether a rank, or its monitor with it, is known to have ended before the rank was done."""
    return _is_known(run_directory, rank) and not has_ended_well(run_directory, rank)


def exits_before_stuck(run_directory: Path, note: StuckNote) -> Outcome:
    """Of a run whose ranks had to be ended: the exits of those that had ended by themselves before."""
    noted = {rank: read_part(rank_exit(run_directory, rank), RankExit) for rank in note.gone_ranks}
    known = {rank: end for rank, end in noted.items() if end is not None}
    return Outcome(
        exit_codes={rank: end.exit_code for rank, end in known.items()},
        ended_at={rank: end.at for rank, end in known.items()},
        stopped="stuck",
    )


def _is_known(run_directory: Path, rank: int) -> bool:
    return rank_exit(run_directory, rank).exists() or is_gone(run_directory, rank)


def _told_to_end(events: dict[int, RankEvents], outcome: Outcome) -> bool:
    """Whether all ranks were told to end at once, as by a user or a scheduler."""
    told = [of_rank.stopped.at for of_rank in events.values() if of_rank.stopped is not None]
    return len(told) == len(events) > 0 and not outcome.vanished and max(told) - min(told) < TOGETHER_SECONDS
