"""Measures what a step of each backend sends: bytes on `lo` per rank, beside what its collectives derive.

Called inside a namespace.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tests.wire.namespace import answer_of_ranks, payload_of_calls

WARMUP_STEPS = 3
"""After two forward passes ZeRO-3 knows its trace."""
MEASURED_STEPS = 8


def measure(rank: int, world_size: int, precision: str, labels: list[str], folder: str, answers: Any) -> None:
    """All backends one after the other on one process group; the counters are read between barriers."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
        CONTRACT_FOLDER=folder,
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    from harness.backends import registry
    from harness.backends.base import World

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    world = World(rank=rank, world_size=world_size, local_rank=rank, ranks_per_node=world_size, device="cpu")
    found = {label: measure_backend(registry.create(label), world, precision) for label in labels}
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure_backend(backend: Any, world: Any, precision: str) -> dict[str, Any]:
    """Bytes per rank of one step, derived from counted collectives and measured."""
    from harness.rank.probes.communication import CommunicationCounter
    from tests.contract.cases import global_batches
    from tests.contract.communication import VolumeCase, prepare, take_step

    case = VolumeCase(1, precision, "like-for-like", tied=False, clipping=None, family="wide")
    engine, _, _ = prepare(backend, world, case)
    batch = next(global_batches())
    for _ in range(WARMUP_STEPS):
        take_step(engine, batch, world, case, None)
    measured = payload_of_calls(lambda: take_step(engine, batch, world, case, None), MEASURED_STEPS)
    counter = CommunicationCounter()
    take_step(engine, batch, world, case, counter)
    engine.close()
    per_rank = [moved / world.world_size for moved in measured]
    return {"derived": derived_bytes(counter.rows()), "measured": per_rank}


def derived_bytes(rows: list[dict[str, Any]]) -> float:
    """What the table of transports makes of counted collectives."""
    from harness.forms.network import transport_sent_bytes

    return sum(
        transport_sent_bytes("gloo", row["op"], row["payload_bytes"], row["group_size"]) for row in rows
    )


def steps(world_size: int, precision: str, labels: list[str]) -> dict[str, dict[str, Any]]:
    """Of each backend the derived bytes, and those of the steps in which no segment was sent twice."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, dict[str, Any]] = answer_of_ranks(
            measure, world_size, precision, labels, folder, seconds=280
        )
    return found
