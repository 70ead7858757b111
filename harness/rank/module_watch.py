"""Which modules a step trains, and in which dtype they compute, as their outputs show it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

from harness.backends.precision import dtype_name
from harness.rank.models.tracing import tensors_with_gradient

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ModuleWatch:
    """Looks on between `start` and `stop`, in the first steps only."""

    def __init__(self, model: nn.Module) -> None:
        self._trained = {
            name: module
            for name, module in model.named_modules()
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        }
        self._products = [module for module in model.modules() if isinstance(module, PRODUCTS)]
        self._dtypes: Counter[str] = Counter()
        self._reached: set[str] = set()
        self._handles: list[Any] = []

    @property
    def compute_dtype(self) -> str | None:
        """Of most outputs of linear layers and convolutions; None: none ran."""
        return self._dtypes.most_common(1)[0][0] if self._dtypes else None

    def start(self) -> None:
        """Look on from here, unless it does."""
        if self._handles:
            return
        for name, module in self._trained.items():
            self._handles.append(module.register_forward_hook(self._note(name)))
        for module in self._products:
            self._handles.append(module.register_forward_hook(self._product))

    def stop(self) -> list[str] | None:
        """Names of trained modules to which no gradient came; None: it did not look on, or none had one."""
        idle = sorted(self._trained.keys() - self._reached) if self._reached else None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._reached.clear()
        return idle

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors_with_gradient(output):
                tensor.register_hook(lambda _: self._reached.add(name))

        return hook

    def _product(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._dtypes[dtype_name(output.dtype)] += 1
