"""FullyShardedDataParallel (FSDP1) of torch 2.13: flat units gathered, their gradients joined and reduced."""

from __future__ import annotations

from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.fsdp.fsdp1 import flat_unit, is_sharded
from harness.forms.fsdp.units import reduce_dtype
from harness.forms.model.layout import Tensor, elements
from harness.forms.peak_memory.step_timeline import GRADIENTS, StepTimeline, Unit, gathering
from harness.forms.terms import named_terms

GATHERED, LOW, CAST, JOINED, CONVERTED, REDUCED, REDUCED_LOW, ACCUMULATED = named_terms(
    "fsdp1", "gathered low cast joined converted reduced reduced_low accumulated"
)


class Fsdp1Timeline(StepTimeline):
    """One unit per block and the root, sharded or not."""

    def begin(self) -> None:
        super().begin()
        workload = self.workload
        units = (*self.units, *([self.root] if self.root else []))
        self._sharded = is_sharded(workload)
        self._pieces = workload.shards if self._sharded else 1
        ranks = workload.shards if self._sharded else workload.world_size
        self._lengths = {
            unit.name: flat_unit(unit.parameters, workload.compute_dtype, ranks).length for unit in units
        }
        self._owners = {tensor.name: unit.name for unit in units for tensor in unit.parameters}
        self._ready: dict[str, int] = {}
        """Bytes of the gradients of a unit that autograd has handed over."""
        self._reduced = DTYPE_BYTES[reduce_dtype(workload)]
        self._width = workload.compute_bytes
        self.looks_ahead = 1

    @property
    def gradient_bytes(self) -> int:
        return self._width

    # Weights

    def before_model(self) -> None:
        if self.root:
            self._gather(self.root)

    def before_forward(self, unit: Unit) -> None:
        self._gather(unit)
        if self.workload.options.get("forward_prefetch"):
            self._ahead(self.units.index(unit) + 1)

    def after_forward(self, unit: Unit) -> None:
        if self.workload.strategy.facts.reshards or not self._sharded:
            self._free(unit)

    def after_model(self) -> None:
        if self.root and not self._sharded:
            self._free(self.root)

    def before_backward_of_model(self) -> None:
        if self.root:
            self._gather(self.root)
        self._ahead_backward(len(self.units) - 1)

    def before_backward(self, unit: Unit) -> None:
        self._gather(unit)
        self._ahead_backward(self.units.index(unit) - 1)

    def _ahead_backward(self, index: int) -> None:
        """`_pre_backward_hook` gathers the next unit before this one computes, unless told otherwise."""
        if self.workload.options.get("backward_prefetch") in (None, "pre"):
            self._ahead(index)

    def _ahead(self, index: int) -> None:
        if 0 <= index < len(self.units):
            self._gather(self.units[index])

    def _gather(self, unit: Unit) -> None:
        mixed = self.workload.mixed
        if unit.name in self.there or not (self._sharded or mixed):
            return
        self.there.add(unit.name)
        size = self._lengths[unit.name] * self._width
        if not self._sharded:
            self.ledger.add(LOW, size)
            self.ledger.look()
            return
        self.ledger.add(GATHERED, size)
        cast = size // self._pieces if mixed else 0
        self.ledger.briefly((CAST, cast), gathering(self.workload, size))

    def _free(self, unit: Unit) -> None:
        if unit.name in self.there:
            self.there.discard(unit.name)
            self.ledger.drop(GATHERED if self._sharded else LOW, self._lengths[unit.name] * self._width)

    # Gradients

    def gradient_ready(self, parameter: Tensor) -> None:
        # Views of the flat parameter: their gradients wait until all of the unit are there.
        size = parameter.numel * self._width
        self.ledger.add(GRADIENTS, size)
        name = self._owners[parameter.name]
        self._ready[name] = self._ready.get(name, 0) + size

    def after_backward(self, unit: Unit) -> None:
        self._join(unit)

    def after_backward_of_model(self) -> None:
        if self.root:
            self._join(self.root)

    def _join(self, unit: Unit) -> None:
        """A flat parameter with any trained part has a gradient of its whole length, and its frozen weights
        have one too, since they are views of it (`_use_unsharded_views`, _flat_param.py)."""
        trained = elements(unit.trained(self.workload.layout))
        shares = trained > 0 and not self.workload.options.get("wraps_layers")
        views = (unit.elements if shares else trained) * self._width
        size = self._lengths[unit.name] * self._width if shares else views
        self.ledger.add(GRADIENTS, views - self._ready.pop(unit.name, 0))
        self.ledger.add(JOINED, size)
        self.ledger.look()
        self.ledger.drop(GRADIENTS, views)
        if self.reduces or self.workload.strategy.facts.reshards or not self._sharded:
            self._free(unit)
        if not trained:
            return
        if not self.reduces:
            if self.micro_step == 0:
                self.ledger.add(ACCUMULATED, size)
            self.ledger.drop(JOINED)
            return
        if self.adds_up_whole:
            self.ledger.drop(JOINED)  # added to what the micro-steps before left, in its place
            self.ledger.drop(ACCUMULATED, size)
            self.ledger.add(JOINED, size)
        with self.ledger.during("reduction"):
            self._reduce(size // self._width)
        self.ledger.drop(JOINED)

    def _reduce(self, length: int) -> None:
        converted = length * self._reduced if self._reduced != self._width else 0
        self.ledger.add(CONVERTED, converted)
        self.ledger.look()
        if self._sharded:
            self.scatter(length, self._pieces, self._reduced, REDUCED, REDUCED_LOW)
        elif self._reduced != self.workload.master_bytes:
            self.ledger.briefly((REDUCED, length * self.workload.master_bytes))
            self.ledger.add(REDUCED, length * self.workload.master_bytes)
        else:
            self.ledger.drop(CONVERTED if converted else JOINED)
            self.ledger.add(REDUCED, length * self._reduced)
        self.ledger.drop(CONVERTED)
