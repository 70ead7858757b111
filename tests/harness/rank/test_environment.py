"""Ranks of one machine are reached from nowhere else."""

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch

from harness.rank.environment import is_deterministic, pin_determinism
from harness.run_directory.request import LOCAL_RENDEZVOUS
from tests.forkserver import context, held_port
from tests.patience import SECONDS

pytestmark = pytest.mark.long(seconds=12)


def listening(port: int, parent: Connection) -> None:
    """A lone rank: which addresses it listens on."""
    from harness.backends.base import World
    from harness.rank.environment import join_process_group

    os.environ |= {"MASTER_PORT": str(port), LOCAL_RENDEZVOUS: "1", "GLOO_SOCKET_IFNAME": "lo"}
    join_process_group(World(rank=0, world_size=1, local_rank=0, ranks_per_node=1, device="cpu"), 30.0)
    found = psutil.Process().net_connections("tcp")
    parent.send([(part.laddr.ip, part.laddr.port) for part in found if part.status == psutil.CONN_LISTEN])


def test_store_and_gloo_of_a_local_run_listen_on_loopback_only() -> None:
    processes: Any = context()
    ours, theirs = processes.Pipe(duplex=False)
    with held_port() as port:
        process = processes.Process(target=listening, args=(port, theirs))
        process.start()
        assert ours.poll(SECONDS)
        found = ours.recv()
        process.join(SECONDS)
    assert port in [number for _, number in found]
    assert {address for address, _ in found} == {"127.0.0.1"}


@pytest.fixture
def own_determinism(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # restored whatever sets it
        monkeypatch.delenv(name)
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warns)


@pytest.mark.usefixtures("own_determinism")
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_record_calls_deterministic_what_is(device: str, wanted: bool) -> None:
    pin_determinism(device, wanted=wanted)
    assert is_deterministic(device) is wanted


@pytest.mark.usefixtures("own_determinism")
def test_an_operator_without_a_deterministic_kernel_fails_on_cuda() -> None:
    """Torch's attention adds up in any order as long as it may only warn."""
    pin_determinism("cuda", wanted=True)
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)  # as a library may
    assert not is_deterministic("cuda")
