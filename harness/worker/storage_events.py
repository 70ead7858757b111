"""Records every storage that a computation allocates and frees, in order, without running it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.worker.kernel_scratch import Scratch


@dataclass(frozen=True, kw_only=True)
class Event:
    """'allocate' or 'free' a storage, 'scratch' (both at once, inside a kernel), 'ready' (a parameter's
    gradient), or 'mark' (a segment begins)."""

    kind: str
    storage: int = 0
    bytes: int = 0
    module: str = ""
    name: str = ""


class StorageEvents(TorchDispatchMode):
    """A dispatch mode; storages that exist when it begins are not its business unless they are freed."""

    def __init__(self, known: Iterator[Tensor], module: Callable[[], str], scratch: Scratch) -> None:
        super().__init__()
        self._scratch = scratch
        self.events: list[Event] = []
        self._module = module
        self._numbers: dict[int, int] = {}
        self._watches: list[weakref.finalize[Any, Any]] = []
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        scratch = self._scratch(function, args, result)
        if scratch:
            self.events.append(Event(kind="scratch", bytes=scratch, module=self._module()))
        return result

    def note(self, kind: str, name: str, tensor: Tensor | None = None) -> None:
        """Add an event of another kind, about the storage of a tensor."""
        number = 0
        if tensor is not None:
            number = self._numbers.get(tensor.untyped_storage()._cdata, 0)
        self.events.append(Event(kind=kind, name=name, storage=number))

    def stop_watching(self) -> None:
        """What is freed from here on is not recorded."""
        for watch in self._watches:
            watch.detach()

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._numbers or not storage.nbytes():
            return
        number = len(self._watches) + 1
        self._numbers[key] = number
        event = Event(kind="allocate", storage=number, bytes=storage.nbytes(), module=self._module())
        self.events.append(event)
        self._watches.append(weakref.finalize(storage, self._freed, key, number))

    def _freed(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self.events.append(Event(kind="free", storage=number))


def autograd_sequence() -> int:
    """Number that the next node of the graph will have."""
    return int(torch._C._autograd._get_sequence_nr())
