"""Watches a rank's GPU from outside of loop and engine, so that `harness doctor --gpu` can check both.

It replaces `torch.cuda.synchronize`, which the loop calls where it starts and stops its clock.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.backends.base import Batch, Engine, World
from harness.backends.optimizer.gradients import global_norm
from harness.files import write_atomically
from harness.run_directory.rank_state import WATCH, DeviceNote, device_note

GRADIENT_ELEMENTS = (2**20, 2**20, 2**18, 2**18, 2**10, 2**10) * 6
"""Of large, middle and small gradients, 63 MB together."""


def watch_device(world: World, engine: Engine, run_directory: Path) -> None:
    """Watch this rank's GPU until the engine is closed, if it was asked to be watched and has one."""
    if WATCH in os.environ and world.device == "cuda":
        DeviceWatch(world, engine, run_directory)


class DeviceWatch:
    """Notes the time of each step by events of its own, and synchronisations within micro-steps."""

    def __init__(self, world: World, engine: Engine, run_directory: Path) -> None:
        self._rank, self._run_directory = world.rank, run_directory
        self._synchronise = torch.cuda.synchronize
        self._forward, self._backward, self._step = engine.forward, engine.backward, engine.step
        self._close = engine.close
        self._before: torch.cuda.Event | None = None
        self._begin: torch.cuda.Event | None = None
        self._is_within = self._has_stepped = False
        self._count = self._micro_steps = 0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._synchronisations: list[int] = []
        torch.cuda.synchronize = self._synchronised
        engine.forward = self._watched_forward  # type: ignore[method-assign]
        engine.backward = self._watched_backward  # type: ignore[method-assign]
        engine.step = self._watched_step  # type: ignore[method-assign]
        engine.close = self._watched_close  # type: ignore[method-assign]

    def _watched_close(self) -> None:
        """Write the note before the engine is closed; takes the norm of gradients of its own."""
        self._synchronise()
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        gradient_bytes, norm_peak_bytes = measure_norm(torch.device("cuda", index))
        note = DeviceNote(
            rank=self._rank,
            index=index,
            uuid=str(properties.uuid),
            name=properties.name,
            event_step_seconds=[begin.elapsed_time(end) / 1e3 for begin, end in self._pairs],
            synchronisations=self._synchronisations,
            micro_steps=self._micro_steps,
            gradient_bytes=gradient_bytes,
            norm_peak_bytes=norm_peak_bytes,
        )
        write_atomically(device_note(self._run_directory, self._rank), note.model_dump_json())
        self._close()

    def _synchronised(self, *arguments: Any, **named: Any) -> None:
        """In place of `torch.cuda.synchronize`."""
        if self._is_within:
            self._count += 1
            self._synchronise(*arguments, **named)
            return
        if self._has_stepped and self._begin is not None:
            self._pairs.append((self._begin, _event()))
            self._has_stepped, self._begin = False, None
        self._synchronise(*arguments, **named)
        self._before = _event()

    def _watched_forward(self, batch: Batch) -> Tensor:
        if not torch.is_grad_enabled():
            return self._forward(batch)
        if self._begin is None:
            self._begin, self._count, self._micro_steps = self._before, 0, 0
        self._micro_steps += 1
        self._is_within = True
        try:
            return self._forward(batch)
        finally:
            self._is_within = False

    def _watched_backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        self._is_within = True
        try:
            self._backward(loss, last_micro_step=last_micro_step)
        finally:
            self._is_within = False

    def _watched_step(self, lr: float) -> float:
        norm = self._step(lr)
        self._synchronisations.append(self._count)
        self._has_stepped = True
        return norm


def measure_norm(device: torch.device) -> tuple[int, int]:
    """Bytes of fp32 gradients, and of what taking their norm allocates at its peak."""
    gradients = [torch.ones(count, device=device) for count in GRADIENT_ELEMENTS]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    global_norm(gradients, None)
    return 4 * sum(GRADIENT_ELEMENTS), torch.cuda.max_memory_allocated(device) - before


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
