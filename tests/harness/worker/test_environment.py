"""Ranks of one machine are reached from nowhere else."""

import os
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from harness.launch.local import free_port
from harness.run_directory.request import LOCAL_RENDEZVOUS
from tests.forkserver import context

pytestmark = pytest.mark.long(seconds=12)


def listening(port: int, parent: Connection) -> None:
    """A lone rank: which addresses it listens on."""
    from harness.backends.base import World
    from harness.worker.environment import join_process_group

    os.environ |= {"MASTER_PORT": str(port), LOCAL_RENDEZVOUS: "1", "GLOO_SOCKET_IFNAME": "lo"}
    join_process_group(World(rank=0, world_size=1, local_rank=0, ranks_per_node=1, device="cpu"), 30.0)
    found = psutil.Process().net_connections("tcp")
    parent.send([(part.laddr.ip, part.laddr.port) for part in found if part.status == psutil.CONN_LISTEN])


def test_store_and_gloo_of_a_local_run_listen_on_loopback_only() -> None:
    processes: Any = context()
    ours, theirs = processes.Pipe(duplex=False)
    port = free_port()
    process = processes.Process(target=listening, args=(port, theirs))
    process.start()
    assert ours.poll(60)
    found = ours.recv()
    process.join(20)
    assert port in [number for _, number in found]
    assert {address for address, _ in found} == {"127.0.0.1"}
