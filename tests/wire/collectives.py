"""Measures what gloo sends for each collective: bytes on `lo` per payload byte and rank.

Called inside a namespace.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from tests.wire.namespace import answer_of_ranks, payload_of_calls

PAYLOAD_BYTES = 4 * 2**20
BLOCKS = 12


def measure(rank: int, world_size: int, answers: Any) -> None:
    """Time-ordered: every rank runs the same collectives; the counters are read between barriers."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511",
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    whole = torch.ones(PAYLOAD_BYTES // 4)
    part = torch.ones(PAYLOAD_BYTES // 4 // world_size)
    parts = list(torch.ones(PAYLOAD_BYTES // 4).chunk(world_size))
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_gather (list)": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    found = {}
    for name, call in calls.items():
        call()
        factors = [moved / world_size / PAYLOAD_BYTES for moved in payload_of_calls(call, BLOCKS)]
        found[name] = median(factors) if factors else None
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def factors(world_size: int) -> dict[str, float | None]:
    """Bytes per payload byte and rank, by collective."""
    found: dict[str, float | None] = answer_of_ranks(measure, world_size, seconds=120)
    return found
