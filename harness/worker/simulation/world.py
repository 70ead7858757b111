"""The world of a simulated rank: a process group of torch that moves nothing and needs no other process."""

from __future__ import annotations

import os

import torch.distributed as dist

from harness.backends import registry
from harness.backends.base import World
from harness.run_directory.simulation import SimulationRequest


def world_of(request: SimulationRequest) -> World:
    """The place of the simulated rank. It computes on the CPU."""
    run = request.run
    world = World(
        rank=request.rank,
        world_size=run.world_size,
        local_rank=request.rank % run.ranks_per_node,
        ranks_per_node=run.ranks_per_node,
        device="cpu",
    )
    return registry.placed(run.backend, world)


def join_fake_group(world: World) -> None:
    """Initialise torch.distributed over the fake backend, and the variables that libraries read."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    dist.init_process_group("fake", rank=world.rank, world_size=world.world_size, store=FakeStore())
