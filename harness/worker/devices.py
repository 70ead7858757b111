"""The GPU of a rank: its own, and nobody else's."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import Store

from harness.backends.base import World
from harness.errors import HarnessError
from harness.gpus.visible import SELECTORS


def take_device(world: World) -> None:
    """Make the GPU of this rank's place on its node the current one.

    Raises HarnessError where the rank does not see it: torchrun and the libraries count on every rank seeing
    all GPUs of its node.
    """
    count = torch.cuda.device_count()
    if world.local_rank >= count:
        selected = [f"{name}={os.environ[name]}" for name in SELECTORS if name in os.environ]
        sees = f"sees {count}" + (f" ({', '.join(selected)})" if selected else "")
        raise HarnessError(
            f"rank {world.rank} takes GPU {world.local_rank} of its node, but {sees}: show every rank all "
            "GPUs of the node (srun --gpu-bind=none), or start fewer ranks"
        )
    torch.cuda.set_device(world.local_rank)


def require_own_devices(world: World, store: Store) -> None:
    """Raise HarnessError on every rank if two ranks have one GPU: NCCL would fail late, or share it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    own = f"{properties.uuid}@{socket.gethostname()}"
    store.set(f"device/{world.rank}", own)
    names = [store.get(f"device/{rank}").decode() for rank in range(world.world_size)]
    if (shared := shared_device(names)) is not None:
        raise HarnessError(shared)


def shared_device(names: Sequence[str]) -> str | None:
    """Which ranks have one device; None: each has its own. names: of the device of each rank."""
    for name in names:
        if len(ranks := [str(rank) for rank, other in enumerate(names) if other == name]) > 1:
            uuid, _, host = name.rpartition("@")
            return (
                f"ranks {', '.join(ranks)} would share GPU {uuid} of {host}; give each its own: the same "
                "CUDA_VISIBLE_DEVICES for all ranks of a node, each device named once"
            )
    return None
