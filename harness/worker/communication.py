"""Counts every collective of every process group, whoever calls it and on whatever transport.

All of them, from Python or C++ threads, pass the dispatcher operators `c10d::*`. A kernel at the key
BackendSelect sees each call and redispatches below itself. It cannot see calls made straight on a
`Backend` object and shared-memory paths that are no collectives of torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from backends.precision import dtype_name

# Operator -> (collective, index of the argument that holds the whole tensor; this rank's piece of it for
# gather and scatter).
OPERATORS: dict[str, tuple[str, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", 0),
    "monitored_barrier_": ("barrier", 0),
}


@dataclass(frozen=True)
class CollectiveKey:
    """What is counted apart."""

    phase: str
    op: str
    dtype: str
    group: str


class CommunicationCounter:
    """Counts inside `counting` and between `start` and `stop`; `phase` names what the loop is doing."""

    def __init__(self) -> None:
        self.phase = "setup"
        self.calls: dict[CollectiveKey, int] = {}
        self.payload_bytes: dict[CollectiveKey, int] = {}
        self.groups: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._library: torch.library.Library | None = None
        self.seconds = 0.0
        """What counting itself took."""

    @property
    def at_work(self) -> bool:
        return self._library is not None

    @contextmanager
    def counting(self, phase: str) -> Iterator[None]:
        """Count what happens inside as `phase`; the phase of before is back afterwards.

        May stand inside another window of counting, which then goes on.
        """
        before, begun_here = self.phase, self._library is None
        self.phase = phase
        if begun_here:
            self.start()
        try:
            yield
        finally:
            self.phase = before
            if begun_here:
                self.stop()

    def start(self) -> None:
        """Put the kernels in place, between two steps. Nothing of them is left after `stop`."""
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)  # type: ignore[attr-defined]
        self._library = torch.library.Library("c10d", "IMPL")
        for name, (op, whole) in OPERATORS.items():
            overload = getattr(torch.ops.c10d, name).default
            self._library.impl(
                name, self._kernel(overload, op, whole, after), "BackendSelect", with_keyset=True
            )

    def stop(self) -> None:
        """Take the kernels away again, if they are there."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def rows(self) -> list[dict[str, Any]]:
        """What was counted so far, one row per phase, collective, dtype and group."""
        return [
            {
                "phase": key.phase,
                "op": key.op,
                "dtype": key.dtype,
                "group": key.group,
                "group_ranks": self.groups[key.group],
                "group_size": len(self.groups[key.group]),
                "role": group_role(self.groups[key.group], dist.get_world_size()),
                "calls": calls,
                "payload_bytes": self.payload_bytes[key],
            }
            for key, calls in self.calls.items()
        ]

    def _kernel(self, overload: Any, op: str, whole: int, after: Any) -> Callable[..., Any]:
        def count_and_redispatch(keyset: Any, *arguments: Any) -> Any:
            begin = time.perf_counter()
            self._count(op, arguments, whole)
            self.seconds += time.perf_counter() - begin
            return overload.redispatch(keyset & after, *arguments)

        return count_and_redispatch

    def _count(self, op: str, arguments: tuple[Any, ...], whole: int) -> None:
        boxed = next(a for a in arguments if isinstance(a, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        tensors = [] if op == "barrier" else _tensors(arguments[whole])
        dtype = dtype_name(tensors[0].dtype) if tensors else "none"
        key = CollectiveKey(self.phase, op, dtype, group.group_name)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if op in ("gather", "scatter"):
            payload *= group.size()  # only the root has the whole, every rank has its piece
        with self._lock:
            if key.group not in self.groups:
                self.groups[key.group] = dist.get_process_group_ranks(group)
            self.calls[key] = self.calls.get(key, 0) + 1
            self.payload_bytes[key] = self.payload_bytes.get(key, 0) + payload


def group_role(ranks: list[int], world_size: int) -> Literal["world", "shard", "replica"]:
    """What a group is for: neighbours share one copy of the weights, ranks apart hold the same shard.

    So the meshes of hybrid sharding are laid out: shard groups are rows, replica groups columns.
    """
    if len(ranks) == world_size:
        return "world"
    consecutive = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return "shard" if consecutive else "replica"


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
