"""Loaded by each Python process of a script: seeds its ranks and, where asked to, keeps what they train on.

Scripts that set no seed of their own then train the same job twice: once to keep it, once to be observed.
"""

from __future__ import annotations

import atexit
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SEED = "OBSERVED_SCRIPT_SEED"
KEEP = "OBSERVED_SCRIPT_KEEP"
"""Variable with the folder that receives initial weights and the batches of each rank; without it nothing is
kept."""


class Keeping:
    """Writes the weights before the first training step, and each batch of the outermost module."""

    def __init__(self, folder: Path) -> None:
        import torch

        self._folder = folder
        self._torch = torch
        self._batches: list[dict[str, Any]] = []
        self._depth = 0
        self._has_weights = False
        self._call = torch.nn.Module.__call__
        self._cross_entropy = torch.nn.functional.cross_entropy

    def start(self) -> None:
        def called(module: Any, *arguments: Any, **named: Any) -> Any:
            return self._called(module, arguments, named)

        def cross_entropy(inputs: Any, target: Any, *arguments: Any, **named: Any) -> Any:
            if self._depth == 0 and self._batches and self._torch.is_grad_enabled():
                self._batches[-1].setdefault("labels", target.detach().cpu().clone())
            return self._cross_entropy(inputs, target, *arguments, **named)

        self._torch.nn.Module.__call__ = called  # type: ignore[method-assign]
        self._torch.nn.functional.cross_entropy = cross_entropy
        atexit.register(self._write)

    def _called(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        trains = module.training and self._torch.is_grad_enabled() and any(True for _ in module.parameters())
        if self._depth == 0 and trains:
            if not self._has_weights:
                self._has_weights = True
                self._write_weights(module)
            self._batches.append(
                {name: value.detach().cpu().clone() for name, value in tensors(arguments, named)}
            )
        self._depth += trains
        try:
            return self._call(module, *arguments, **named)
        finally:
            self._depth -= trains

    def _write_weights(self, module: Any) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        self._depth += 1
        if type(module).__name__ == "DeepSpeedEngine":
            state = module.module.state_dict()
        else:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(module, options=options)
        self._depth -= 1
        if os.environ["RANK"] == "0":
            kept = {name: value.detach().cpu().clone() for name, value in state.items()}
            self._torch.save(kept, self._folder / "weights.pt")

    def _write(self) -> None:
        self._torch.save(self._batches, self._folder / f"batches-{os.environ['RANK']}.pt")


def tensors(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors with a dimension that a module is called with, by name or place."""
    import torch

    placed = [(str(place), value) for place, value in enumerate(arguments)]
    for name, value in [*placed, *named.items()]:
        if isinstance(value, Mapping):
            yield from tensors((), value)
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{place}", v) for place, v in enumerate(value) if hasattr(v, "dim"))
        elif isinstance(value, torch.Tensor) and value.dim() > 0:
            yield name, value


def start() -> None:
    import numpy
    import torch

    seed = int(os.environ[SEED])
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    if KEEP in os.environ:
        Keeping(Path(os.environ[KEEP])).start()


if __name__ == "sitecustomize" and SEED in os.environ and "RANK" in os.environ:
    start()
