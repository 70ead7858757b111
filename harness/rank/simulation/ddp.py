"""What DDP's reducer (C++, torch 2.13) needs without other ranks, and for tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

HOOK = "DDP reduces its buckets from a hook in Python: the fake group has no result for the one in C++"
REBUILT = (
    "DDP's buckets are arranged in the order in which gradients arrived by a copy of its rule: its own reads "
    "and broadcasts the order from memory that fake tensors do not have"
)


def all_reduce_from_python(ddp: DistributedDataParallel) -> None:
    """Reduce each bucket in place, as the default hook does; its division changes no size."""

    def hook(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        dist.all_reduce(buffer, group=ddp.process_group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    # Not `register_comm_hook`, which refuses annotations that are text.
    dist._register_comm_hook(ddp.reducer, None, hook)  # type: ignore[attr-defined]


@contextmanager
def without_checks_between_ranks() -> Iterator[None]:
    """Skip what DDP does while it is built that reads data: comparing shapes, and sending weights."""
    names = ("_verify_param_shape_across_processes", "_sync_module_states")
    nothing: dict[str, Any] = {name: lambda *_, **__: None for name in names}
    with patch.multiple(ddp_module, **nothing):
        yield


class RebuiltOnce:
    """Stands for a reducer; rearranges its buckets before the second step, as `Reducer::rebuild_buckets`."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._reducer: Any = ddp.reducer
        self._arrived: list[int] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrival(index))
            for index, parameter in enumerate(self._parameters())
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        if not self._hooks or len(set(self._arrived)) < len(self._hooks):
            return False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._reducer = None  # with its hooks and buckets
        _build_reducer(self._ddp, order=list(dict.fromkeys(self._arrived)))
        all_reduce_from_python(self._ddp)
        self._reducer, self._ddp.reducer = self._ddp.reducer, self  # type: ignore[assignment]
        return True

    def _parameters(self) -> list[torch.nn.Parameter]:
        parameters, _ = self._ddp._build_params_for_reducer()
        return list(parameters)

    def _arrival(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self._arrived.append(index)


def _build_reducer(ddp: DistributedDataParallel, order: list[int]) -> None:
    """Give DDP a reducer whose buckets follow `order`, cut by DDP's own function and limits."""
    parameters, sparse = ddp._build_params_for_reducer()
    _, limits = ddp._bucket_config.compute_bucket_size_limits(
        static_graph=ddp.static_graph, find_unused_parameters=ddp.find_unused_parameters
    )
    config = ddp._bucket_config
    limits = limits or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]  # as `rebuild_buckets`
    assign: Callable[..., Any] = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    arranged = [parameters[index] for index in order]
    positions, sizes = assign(arranged, limits, [sparse[index] for index in order])
    buckets = [[order[position] for position in bucket] for bucket in positions]

    def assigned(*_: Any) -> tuple[Any, Any]:
        return list(reversed(buckets)), list(reversed(sizes))  # the caller turns them round

    with patch.object(dist, assign.__name__, assigned):
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
