"""Sets a rank up: threads, determinism, device, process group."""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from harness.backends.base import World
from harness.errors import HarnessError
from harness.gpus.found import SELECTORS
from harness.rank.models.changes import pin_compiler
from harness.rank.process.start import keep_lock_of_bars
from harness.run_directory.request import LOCAL_RENDEZVOUS, RunRequest


def take_device(world: World) -> None:
    """Make this rank's GPU the current one: that of its place on its node, or the only one that it sees.

    `srun --gpus-per-task=1` and a pod for each GPU show a rank none but its own. DeepSpeed and Accelerate
    take their device from LOCAL_RANK, which is 0 for the libraries of such a rank from here on. Raises
    HarnessError where a rank sees several GPUs, but not one for its place.
    """
    count = torch.cuda.device_count()
    index = 0 if count == 1 else world.local_rank
    if index >= count:
        selected = [f"{name}={os.environ[name]}" for name in SELECTORS if name in os.environ]
        sees = f"sees {count}" + (f" ({', '.join(selected)})" if selected else "")
        raise HarnessError(
            f"rank {world.rank} takes GPU {world.local_rank} of its node, but {sees}: show every rank all "
            "GPUs of the node (srun --gpu-bind=none) or its own alone (--gpus-per-task=1), or start fewer "
            "ranks"
        )
    torch.cuda.set_device(index)
    os.environ["LOCAL_RANK"] = str(index)


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
                f"ranks {', '.join(ranks)} would share GPU {uuid} of {host}; give each its own: one "
                "CUDA_VISIBLE_DEVICES for all ranks of a node, each device named once, or one device for each"
            )
    return None


# Parameters of glibc's mallopt(3), and the largest MMAP_THRESHOLD that it takes on 64 bits.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_HEAP_BLOCK_BYTES = 32 * 2**20
KEPT_BYTES = 2**30
SMALLEST_MAPPED_BLOCK_BYTES = 2**16


def world_of(device: str, ranks_per_node: int | None = None) -> World:
    """This rank's place, from the variables that torchrun, Slurm's wrappers and our launcher set.

    `ranks_per_node`: where they do not say; default: all ranks.
    """
    return World(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE") or ranks_per_node or os.environ["WORLD_SIZE"]),
        device=device,
    )


def prepare_process(request: RunRequest, world: World) -> None:
    """Pin threads, determinism and the device before anything is built."""
    return_freed_memory()
    keep_lock_of_bars()
    for name in request.launcher_settings:
        os.environ.pop(name, None)
    torch.set_num_threads(request.threads_per_rank)
    if world.device == "cuda":
        take_device(world)
        note_out_of_memory()
        torch.backends.cuda.matmul.allow_tf32 = request.job.training.tf32
        torch.backends.cudnn.allow_tf32 = request.job.training.tf32
    pin_determinism(world.device, wanted=request.job.training.deterministic)
    if request.job.model.compile != "none":
        pin_compiler(world.device)


def note_out_of_memory() -> None:
    """Have the allocator write to standard error when it must refuse memory.

    The exception comes later than it: where the way out of it waits for the device, NCCL's watchdog ends the
    process first, and nothing else would say why.
    """

    def tell(device: int, wanted_bytes: int, total_bytes: int, free_bytes: int) -> None:
        sys.stderr.write(
            f"CUDA out of memory on device {device}: {wanted_bytes} bytes were asked for, {free_bytes} of "
            f"{total_bytes} are free\n"
        )
        sys.stderr.flush()

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(tell)


def pin_determinism(device: str, *, wanted: bool) -> None:
    """Deterministic kernels or none: on CUDA an operator that has none raises.

    With `warn_only` the backward pass of attention adds up in any order (torch 2.13,
    ATen/native/transformers/cuda/attention_backward.cu), so that repeats of a run differ. On the CPU kernels
    that torch only warns of are deterministic on as many threads.
    """
    if wanted and device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers, the kernel of flash_attn
    torch.use_deterministic_algorithms(wanted, warn_only=device == "cpu")
    # Deterministic mode would fill every fresh buffer, which costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def is_deterministic(device: str | None = None) -> bool:
    """Whether `pin_determinism`, or whoever came after it, leaves only deterministic kernels.

    device: None for a GPU if the process has touched one.
    """
    device = device or ("cuda" if torch.cuda.is_initialized() else "cpu")
    only_warns = device == "cuda" and torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not only_warns


def return_freed_memory() -> None:
    """Have the C library give freed tensors back at once, while a model is set up.

    Otherwise it keeps pieces between others that live on: the host then holds much more than its shards.
    """
    _set_malloc(SMALLEST_MAPPED_BLOCK_BYTES, SMALLEST_MAPPED_BLOCK_BYTES)


def keep_freed_memory() -> None:
    """Have the C library keep what tensors free, up to KEPT_BYTES, instead of giving it back.

    Otherwise the history of the heap decides how many pages each step faults in again: from 0 to 5,500 in
    steps of one job, some percent of their time. Left alone where the user chose (MALLOC_* is set) or where
    the C library is not glibc.
    """
    _set_malloc(LARGEST_HEAP_BLOCK_BYTES, KEPT_BYTES)


def _set_malloc(mmap_threshold: int, trim_threshold: int) -> None:
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(M_TRIM_THRESHOLD, trim_threshold)


def join_process_group(world: World, timeout_seconds: float) -> str:
    """Initialise torch.distributed over nccl or gloo; return which."""
    backend = "nccl" if world.device == "cuda" else "gloo"
    if dist.is_initialized():
        return backend
    store = _local_store(world, timeout_seconds) if LOCAL_RENDEZVOUS in os.environ else None
    device = None
    if world.device == "cuda":
        if store is None:  # that which torchrun's variables name
            timeout = timedelta(seconds=timeout_seconds)
            found, _, _ = next(rendezvous("env://", world.rank, world.world_size, timeout=timeout))
            store = PrefixStore("default_pg", found)
        require_own_devices(world, store)
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device,
    )
    return backend


def _local_store(world: World, timeout_seconds: float) -> Any:
    """The store of ranks that all run on this machine: torch's own listens on every interface."""
    store = partial(
        dist.TCPStore,  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world.world_size,
        world.rank == 0,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=None if world.rank else int(os.environ[LOCAL_RENDEZVOUS]),
    )
    try:
        return store()
    except NotImplementedError:  # of libuv's server in torch 2.6, which opens its socket itself
        return store(use_libuv=False)


def random_state(device: str) -> str:
    """Digest of the state of the generators that torch's operators draw from."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16)
    if device == "cuda":
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def device_name(world: World) -> str:
    return torch.cuda.get_device_name() if world.device == "cuda" else "cpu"
