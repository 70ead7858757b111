"""What each node of a run is: written on the node, read by whoever assembles the record elsewhere."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import psutil

from harness.files import write_atomically
from harness.record import EnvironmentPart, InterfacePart, NodePart, Part
from harness.record.provenance import environment
from harness.run_directory.events import SetupEvent
from harness.run_directory.rank_state import read_part
from harness.run_directory.request import RunRequest

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
