"""Measures collectives on the ranks of a group: warm-up, batches of repeats, the slowest rank counts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import psutil
import torch
import torch.distributed as dist

from harness.fabric.result import FabricResult, FabricRow, pairs_to_test, sizes_to_test, whole_elements
from harness.forms.textbook import is_stub
from harness.rank.process.environment import join_process_group, take_device, world_of

COLLECTIVE_TIMEOUT_SECONDS = 600.0
BATCHES = 3
COPIES = {"all_gather": 4, "reduce_scatter": 4}
"""Times that a rank holds the tensor: with its part of it, and as often again within gloo, which flattens."""
COPIES_IN_PLACE = 2
"""Of the other operations: the tensor, and what the transport has under way."""


def measure(device: str, largest: int, operations: Sequence[str], *, repeats: int) -> FabricResult:
    """This rank's part of a self-test under torchrun. Raises HarnessError where there is no GPU."""
    world = world_of(device)
    if device == "cuda":
        take_device(world)
    join_process_group(world, COLLECTIVE_TIMEOUT_SECONDS)
    result = FabricTest(device, repeats=repeats).run(largest, operations)
    dist.barrier()
    return result


SECONDS_PER_ROW = 5.0
"""Sizes that would take longer are repeated less."""
WARMUP_OPERATIONS = 5
"""Before the timed ones of a size, unless fewer are timed."""


class FabricTest:
    """One self-test, the same on every rank of the default group."""

    def __init__(self, device: str, *, repeats: int) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = (
            torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        )
        self.device_name = torch.cuda.get_device_name() if device == "cuda" else None
        self.repeats = repeats

    def run(self, largest_bytes: int, operations: Sequence[str]) -> FabricResult:
        """Measure; every rank returns the same rows."""
        hosts: list[Any] = [None] * self.world_size
        dist.all_gather_object(hosts, socket.gethostname())
        copies = max(COPIES.get(op, COPIES_IN_PLACE) for op in operations)
        largest = self._agreed_largest(largest_bytes, hosts, copies)
        rows = []
        tensor = torch.zeros(whole_elements(largest, self.world_size), device=self.device)  # sums stay zero
        for op in operations:
            if op == "point_to_point":
                for pair in pairs_to_test(hosts):
                    rows += self._sizes(op, list(pair), tensor, largest)
            else:
                rows += self._sizes(op, list(range(self.world_size)), tensor, largest)
        if is_stub(self.device_name or ""):  # its durations say nothing of a network
            rows = [row.model_copy(update={"seconds": []}) for row in rows]
        variable = "NCCL_SOCKET_IFNAME" if self.device.type == "cuda" else "GLOO_SOCKET_IFNAME"
        return FabricResult(
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            transport=dist.get_backend(),
            device=self.device.type,
            device_name=self.device_name,
            hosts=hosts,
            interface=os.environ.get(variable),
            rows=rows,
        )

    def _sizes(self, op: str, ranks: list[int], tensor: torch.Tensor, largest: int) -> list[FabricRow]:
        rows: list[FabricRow] = []
        for size in sizes_to_test(largest):
            expected = 4 * min(rows[-1].seconds) if rows else 0.0
            elements = whole_elements(size, self.world_size)
            rows.append(self._row(op, ranks, tensor[:elements], expected))
        return rows

    def _row(self, op: str, ranks: list[int], tensor: torch.Tensor, expected_seconds: float) -> FabricRow:
        """One size; fewer repeats where they would take longer than a row may."""
        action, per_call = self._action(op, ranks, tensor)
        repeats = self.repeats
        if expected_seconds:
            repeats = max(1, min(repeats, int(SECONDS_PER_ROW / expected_seconds / BATCHES)))
        self._batch(action, min(WARMUP_OPERATIONS, repeats))
        seconds = [self._batch(action, repeats) / per_call for _ in range(BATCHES)]
        return FabricRow(
            op=op,
            ranks=ranks,
            size_bytes=tensor.numel() * tensor.element_size(),
            repeats=repeats,
            seconds=seconds,
        )

    def _batch(self, action: Callable[[], object], repeats: int) -> float:
        """Seconds of one action on the slowest rank."""
        dist.barrier()
        self._synchronise()
        begin = time.perf_counter()
        for _ in range(repeats):
            action()
        self._synchronise()
        seconds = torch.tensor(
            [(time.perf_counter() - begin) / repeats], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def _action(self, op: str, ranks: list[int], tensor: torch.Tensor) -> tuple[Callable[[], object], int]:
        """What to repeat, and how many passages of the tensor one call makes in sequence."""
        shard = tensor[: tensor.numel() // self.world_size]
        part = shard.clone() if op in COPIES else shard

        def there_and_back() -> None:
            if self.rank == ranks[0]:
                dist.send(tensor, ranks[1])
                dist.recv(tensor, ranks[1])
            elif self.rank == ranks[1]:
                dist.recv(tensor, ranks[0])
                dist.send(tensor, ranks[0])

        actions: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(tensor),
            "all_gather": lambda: dist.all_gather_into_tensor(tensor, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, tensor),
            "broadcast": lambda: dist.broadcast(tensor, 0),
            "point_to_point": there_and_back,
        }
        return actions[op], 2 if op == "point_to_point" else 1

    def _agreed_largest(self, wanted: int, hosts: Sequence[str], copies: int) -> int:
        """The largest size that fits into the memory of every rank, so many copies of it."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
        else:
            free = psutil.virtual_memory().available // hosts.count(hosts[self.rank])
        fits = torch.tensor([min(wanted, free // copies)], dtype=torch.int64, device=self.device)
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        return max(1024, int(fits))

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
