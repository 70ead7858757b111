"""Sets a rank up: threads, determinism, device, process group; and the way out."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from backends.base import World
from harness.request import RunRequest


def world_of(request: RunRequest) -> World:
    """This rank's place, from the variables that torchrun, Slurm's wrappers and our launcher set."""
    return World(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", request.ranks_per_node)),
        device=request.device,
    )


def prepare_process(request: RunRequest, world: World) -> None:
    """Pin threads, determinism and the device before anything is built."""
    torch.set_num_threads(request.threads_per_rank)
    deterministic = request.job.training.deterministic
    if world.device == "cuda":
        torch.cuda.set_device(world.local_rank)
        torch.backends.cuda.matmul.allow_tf32 = request.job.training.tf32
        torch.backends.cudnn.allow_tf32 = request.job.training.tf32
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # Deterministic mode would fill every fresh buffer, which costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def join_process_group(world: World, timeout_seconds: float) -> str:
    """Initialise torch.distributed over nccl or gloo; return which."""
    backend = "nccl" if world.device == "cuda" else "gloo"
    if dist.is_initialized():
        return backend
    device = torch.device("cuda", world.local_rank) if world.device == "cuda" else None
    dist.init_process_group(
        backend,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device,
    )
    return backend


def device_name(world: World) -> str:
    """The accelerator's name, or 'cpu'."""
    return torch.cuda.get_device_name() if world.device == "cuda" else "cpu"


def leave(code: int) -> NoReturn:
    """End the process without static destructors.

    About 2 % of DeepSpeed runs on gloo die in them after their work is done ('terminate called without
    an active exception'), which would turn a finished run into a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
