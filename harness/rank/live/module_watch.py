"""Which modules a step runs, which parameters it gives a gradient, and in which dtype modules compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from harness.backends.model.precision import dtype_name
from harness.rank.live.live_model import bare_module_name

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MOST_PRODUCTS = 1000
"""Layers of another dtype than most that are named."""
MOST_NAMES = 20_000
"""After so many, what changes from step to step, as with experts, is no longer noted."""


class ModuleWatch:
    """Looks on between `start` and `stop` in the first steps; gradients are noted for as long as they can be.

    Libraries put tensors of their own in the place of parameters while a module runs, so those are noted that
    stand there then. What is the same tensor in two steps keeps its note in all that follow: one call of
    Python per parameter and backward pass.
    """

    def __init__(self, model: nn.Module, ran: Callable[[str], None] = lambda _: None) -> None:
        """ran: told of each module with parameters, the model itself left out, as it begins."""
        self._model, self._ran = model, ran
        names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._trained = frozenset(names.values())
        self._own: dict[nn.Module, list[tuple[str, str]]] = {}
        for module in model.modules():
            own = module.named_parameters(recurse=False)
            self._own[module] = [(local, names[id(p)]) for local, p in own if id(p) in names]
        self._products: dict[nn.Module, str] = {
            m: name for name, m in model.named_modules() if isinstance(m, PRODUCTS)
        }
        self._dtypes: Counter[str] = Counter()
        self._dtype_of: dict[nn.Module, str] = {}
        self._reached: set[str] = set()
        self._noted: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._lasting: set[str] = set()
        self._new: set[str] = set()
        self._handles: list[Any] = []
        self._notes: list[Any] = []
        self._told: list[str] | None = None
        self._left = MOST_NAMES
        self.is_over = False
        """Whether it is no longer known which parameters have a gradient."""

    @property
    def compute_dtype(self) -> str | None:
        """Of most outputs of linear layers and convolutions; None: none ran."""
        return self._dtypes.most_common(1)[0][0] if self._dtypes else None

    @property
    def products_otherwise(self) -> dict[str, list[str]]:
        """Of other dtypes than that, the layers whose outputs had them, by dtype."""
        found: dict[str, list[str]] = {}
        for module, dtype in self._dtype_of.items():
            if dtype != self.compute_dtype:
                found.setdefault(dtype, []).append(bare_module_name(self._products[module]))
        return {dtype: sorted(names)[:MOST_PRODUCTS] for dtype, names in found.items()}

    def start(self) -> None:
        """Look on from here, unless it does."""
        if self._handles:
            return
        for module, own in self._own.items():
            if own:
                self._handles.append(module.register_forward_pre_hook(self._before(own)))
        # Before the hooks of libraries, which gather weights there; FSDP1 put wrappers into the model.
        for name, module in self._model.named_modules():
            if name and any(True for _ in module.parameters()):
                self._handles.append(module.register_forward_pre_hook(self._begin(name), prepend=True))
        for module in self._products:
            self._handles.append(module.register_forward_hook(self._product))

    def stop(self) -> None:
        """Look on no further; what lasts stays noted."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_step(self) -> list[str] | None:
        """Names of trained parameters to which no gradient came; None: as before, or it is not known."""
        self._new.clear()
        if self.is_over or not (self._reached or self._lasting or self._told is not None):
            return None
        known = self._trained if self._handles else self._lasting
        missing = sorted((known - self._reached) | (set(self._told or ()) - known))
        self._reached.clear()
        if not known or len(missing) > self._left:
            self._leave()
            return None
        if missing == self._told:
            return None
        self._told, self._left = missing, self._left - len(missing)
        return missing

    def _leave(self) -> None:
        self.is_over = True
        for note in self._notes:
            note.remove()
        self._notes.clear()

    def _begin(self, name: str) -> Callable[..., None]:
        bare = bare_module_name(name)
        return lambda module, inputs: self._ran(bare)

    def _before(self, own: list[tuple[str, str]]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            for local, name in own:
                tensor = getattr(module, local, None)
                if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                    continue
                if self._noted.get(name) is tensor:
                    if name not in self._new:
                        self._lasting.add(name)
                    continue
                self._lasting.discard(name)
                note = tensor.register_hook(lambda _, name=name: self._reached.add(name))
                if tensor.is_leaf:
                    self._noted[name] = tensor
                    self._new.add(name)
                    self._notes.append(note)

        return hook

    def _product(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            dtype = self._dtype_of[module] = dtype_name(output.dtype)
            self._dtypes[dtype] += 1
