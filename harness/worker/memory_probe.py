"""Reads the memory of this rank at named moments of the probed steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from harness.backends.base import Engine
from harness.record import Moment
from harness.worker.memory import AllocatorProbe, LiveBytes, live_bytes_by_kind
from harness.worker.process_memory import process_memory

NO_BACKWARD = -1
"""What torch says of the backward pass that this thread is in if it is in none."""


class MemoryProbe:
    """Kinds are walked over the engine's tensors; the rest that the allocator serves is 'other'."""

    def __init__(
        self, allocator: AllocatorProbe, engine: Engine, data: Callable[[], Iterable[Tensor]] = tuple
    ) -> None:
        self.allocator = allocator
        self.rows: list[dict[str, Any]] = []
        self._engine = engine
        self._data = data
        self._rest_before_forward: int | None = None
        self._gathered: list[int] = []
        self._hook: Any = None
        self._watching_seconds = 0.0

    def begin(self) -> None:
        """Start a probed step: peaks count from here."""
        self._hook = register_module_forward_hook(self._after_module)
        self.allocator.reset_peak()

    def end(self) -> float:
        """End a probed step, if one is going on; return the seconds spent on watching its modules."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        spent, self._watching_seconds = self._watching_seconds, 0.0
        return spent

    def before_forward(self) -> None:
        """Remember what is there before a forward pass, so that its activations can be identified."""
        self.allocator.wait_until_stable()
        live = self._live()
        self._rest_before_forward = _rest(self.allocator.allocated_bytes(), live)

    def record(self, step: int, moment: Moment) -> None:
        """Add a row for this moment and count peaks from here."""
        peak = self.allocator.peak_bytes()
        self.allocator.wait_until_stable()
        live = self._live()
        allocated = self.allocator.allocated_bytes()
        rest = _rest(allocated, live)
        kinds = None if live.inside is None else dict(live.inside)
        if kinds is not None and rest is not None:
            if moment == "after_forward" and self._rest_before_forward is not None:
                kinds["activations"] = rest - self._rest_before_forward
                rest = self._rest_before_forward
            kinds["other"] = rest
        self.rows.append(
            {
                "step": step,
                "moment": moment,
                "allocated_bytes": allocated,
                "peak_bytes": peak,
                "kinds": kinds,
                "outside_kinds": live.outside,
                "gathered_peak_bytes": max(self._gathered, default=None),
                "gathered_least_bytes": min(self._gathered, default=None),
                "file_bytes": self._engine.file_bytes(),
                **process_memory(self.allocator),
            }
        )
        self._rest_before_forward = None
        self._gathered = []
        self.allocator.reset_peak()

    @contextmanager
    def span(self, step: int, moment: Moment) -> Iterator[None]:
        """Record what happens in between as one moment: its peak, and what lives at its end."""
        self.begin()
        try:
            yield
        finally:
            self.end()
        self.record(step, moment)

    def _live(self) -> LiveBytes:
        data = (("data", tensor) for tensor in self._data())
        engine = self._engine.state_tensors()
        first = next(engine, None)
        if first is None:  # a backend that names no tensors: its kinds are unknown, not zero
            return LiveBytes(inside=None, outside=None)
        live = live_bytes_by_kind(chain([first], engine, data), self.allocator)
        return live.with_inside(self._engine.hidden_bytes())

    def _after_module(self, module: nn.Module, *_: Any) -> None:
        """Weights are gathered while a module computes; its library's own hooks run after this one.

        Not in a backward pass that recomputes: libraries then gather ahead in both directions.
        """
        if torch.compiler.is_compiling():
            return  # of what a graph calls nothing stands between gathering and use
        if not module._parameters or torch._C._current_graph_task_id() != NO_BACKWARD:
            return
        begin = time.perf_counter()
        gathered = (("gathered", tensor) for tensor in self._engine.gathered_tensors())
        live = live_bytes_by_kind(gathered, self.allocator).inside or {}
        self._gathered.append(live.get("gathered", 0))
        self._watching_seconds += time.perf_counter() - begin


def _rest(allocated: int | None, live: LiveBytes) -> int | None:
    """What the allocator has served beyond the live tensors."""
    return None if allocated is None or live.inside is None else allocated - sum(live.inside.values())
