"""Counts every collective of every process group, whoever calls it and on whatever transport.

All of them, from Python or C++ threads, pass the dispatcher operators `c10d::*`. A kernel at the key
BackendSelect sees each call and redispatches below itself. It cannot see calls made straight on a
`Backend` object and shared-memory paths that are no collectives of torch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from harness.backends.mesh import Mesh
from harness.backends.model.precision import dtype_name
from harness.backends.optimizer.groups import tensors_in
from harness.backends.pipeline.cut import PHASES
from harness.forms.terms import BETWEEN
from harness.forms.workload import ELSEWHERE
from harness.traces.scanning import OPERATORS

MESSAGES = ("send", "recv")
WITH_GRADIENTS = "torch.distributed.nn.functional"
PASSED_THROUGH = (
    __name__, "torch._ops", "torch._compile", "torch._dynamo", "torch.overrides",
    "torch.utils._python_dispatch", "harness.rank.models.description",
    "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "typing_extensions",
)  # fmt: skip
"""Between who communicates and the operator."""
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
SETUP = "setup"
LOADERS = ("torch.utils.data", "accelerate.data_loader")
"""Modules that feed batches, also by sending them from one rank to others."""


@dataclass(frozen=True)
class CollectiveKey:
    """Key of a separate count."""

    phase: str
    op: str
    dtype: str
    group: str
    of_job: bool
    by: str = ""


@dataclass
class Count:
    """Count of one key."""

    calls: int = 0
    payload_bytes: int = 0
    largest_bytes: int = 0
    """Payload of the largest call."""

    def add(self, payload_bytes: int) -> None:
        self.calls += 1
        self.payload_bytes += payload_bytes
        self.largest_bytes = max(self.largest_bytes, payload_bytes)


class CommunicationCounter:
    """Counts inside `counting` and between `start` and `stop`; `phase` names what the loop is doing."""

    def __init__(
        self, mesh: Mesh | None = None, packages: Collection[str] = (), backend: Collection[str] = ()
    ) -> None:
        self.mesh = mesh
        """Names the roles of groups where ranks share samples."""
        self._packages = frozenset(packages)
        """Names of the modules, or of the packages, that the job brings."""
        self._backend = frozenset(backend)
        """Names of the modules that make the backend, which may lie in the same package."""
        self.phase = SETUP
        self.apart = ""
        """A model that runs beside the one that trains: what it sends is no part of the phase; '': none."""
        self.early = False
        """Whether this micro-step is not the last of its step."""
        self.early_reduced_bytes: int | None = None
        """Payload of reductions in backward passes of such micro-steps; None: none was counted."""
        self.counts: dict[CollectiveKey, Count] = {}
        self.groups: dict[str, list[int]] = {}
        self._world_size = 1
        self._lock = threading.Lock()
        self._library: torch.library.Library | None = None
        self.seconds = 0.0
        """What counting itself took."""

    @property
    def at_work(self) -> bool:
        return self._library is not None

    def begin_micro_step(self, *, last: bool) -> None:
        """What follows belongs to a micro-step that is or is not the last of its step."""
        self.early = not last
        if self.early and self.at_work and self.early_reduced_bytes is None:
            self.early_reduced_bytes = 0

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
        for name, (op, tensors_at) in OPERATORS.items():
            overload = getattr(torch.ops.c10d, name).default

            def kernel(
                keyset: Any, *arguments: Any, overload: Any = overload, op: str = op, at: int = tensors_at
            ) -> Any:
                begin = time.perf_counter()
                self._count(op, arguments, at)
                self.seconds += time.perf_counter() - begin
                return overload.redispatch(keyset & after, *arguments)

            self._library.impl(name, kernel, "BackendSelect", with_keyset=True)

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
                "of_job": key.of_job,
                "by": key.by,
                "dtype": key.dtype,
                "group": key.group,
                "group_ranks": self.groups[key.group],
                "group_size": len(self.groups[key.group]),
                "role": group_role(self.groups[key.group], self._world_size, self.mesh),
                **asdict(count),
            }
            for key, count in self.counts.items()
        ]

    def _count(self, op: str, arguments: tuple[Any, ...], tensors_at: int) -> None:
        boxed = next(a for a in arguments if isinstance(a, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        tensors = [] if op == "barrier" else tensors_in(arguments[tensors_at])
        if op == "all_to_all":  # its splits are the lists among the arguments
            sizes = [a for a in arguments if isinstance(a, (list, tuple)) and a and isinstance(a[0], int)]
            if any(sum(size > 0 for size in split) == 1 < len(split) for split in sizes):
                op = "permute"  # all of it goes to a single rank
        phase = BETWEEN if self.apart and self.phase != SETUP else self.phase
        by = (self.apart or caller()) if phase == BETWEEN else ""
        if op in MESSAGES and phase in ("forward", "backward"):
            # A message between pipeline stages says itself which pass it belongs to.
            phase = PHASES.get(arguments[-1], phase)
        # Only the root of these two holds the complete tensor; every rank has its piece.
        pieces = group.size() if op in ("gather", "scatter") else 1
        of_job = bool(self._packages) and phase != BETWEEN and called_by(self._packages, self._backend)
        sizes_by_dtype: dict[str, int] = {} if tensors else {"none": 0}
        for tensor in tensors:  # a call that joins several dtypes is counted under each
            name = dtype_name(tensor.dtype)
            sizes_by_dtype[name] = sizes_by_dtype.get(name, 0) + tensor.numel() * tensor.element_size()
        with self._lock:
            if group.group_name not in self.groups:
                self.groups[group.group_name] = dist.get_process_group_ranks(group)
                self._world_size = dist.get_world_size()
            role = group_role(self.groups[group.group_name], self._world_size, self.mesh)
            # Along 'tensor' ranks add up gradients of activations, in every micro-step.
            reduces = op in REDUCTIONS and not of_job and group.size() > 1 and role != "tensor"
            for dtype, payload in sizes_by_dtype.items():
                key = CollectiveKey(phase, op, dtype, group.group_name, of_job, by)
                self.counts.setdefault(key, Count()).add(payload * pieces)
                if self.early and phase == "backward" and reduces:
                    self.early_reduced_bytes = (self.early_reduced_bytes or 0) + payload


def called_by(packages: Collection[str], but: Collection[str] = ()) -> bool:
    """Whether the code that communicates lies in one of these packages, or is a gradient of torch's
    collectives with gradients, which no library uses for weights."""
    name = next(_callers(), "")
    return name.startswith(WITH_GRADIENTS) or (name.partition(".")[0] in packages and name not in but)


def caller() -> str:
    """Name of the module whose code communicates; of what feeds batches that of its loader."""
    names = list(_callers())
    return next((name for name in names if name.startswith(LOADERS)), next(iter(names), ""))


def _callers() -> Iterator[str]:
    """Names of the modules on the stack, the innermost first, without what only passes a collective on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(PASSED_THROUGH):
            yield name
        frame = frame.f_back


def group_role(ranks: list[int], world_size: int, mesh: Mesh | None = None) -> str:
    """Role of a group: the dimensions of the mesh along which it lies, where ranks share samples.

    Without such a mesh neighbours share one copy of the weights; otherwise the group's ranks hold the same
    shard. So the meshes of hybrid sharding are laid out: shard groups are rows, replica groups columns.
    """
    if mesh is not None and mesh.shares_samples:
        return mesh.role(ranks) or ELSEWHERE
    if len(ranks) == world_size:
        return "world"
    consecutive = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return "shard" if consecutive else "replica"


def release_finished_collectives() -> None:
    """Free the buffers of finished collectives; all ranks call it. At most some tenths of a second.

    ProcessGroupNCCL keeps the tensors of a collective whose future was waited for, as DDP's reducer does,
    until its watchdog comes by, every 100 ms, and the next collective begins (torch 2.13,
    `shelvesToUnstash_` in ProcessGroupNCCL.hpp). DDP lays out its buckets anew in the second step: the old
    ones would count for the peaks of the steps that follow, on the ranks whose watchdog is late. What a
    communication hook of DDP compressed would be left of some steps and not of others.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    group = dist.group.WORLD
    assert group is not None
    group._wait_for_pending_works()
    dist.barrier()
