"""FSDP1 and FSDP2 of torch 2.13: units gathered, their gradients joined or copied, and reduced."""

from __future__ import annotations

from collections.abc import Sequence

from harness.forms.fsdp.fsdp1 import flat_unit, is_sharded
from harness.forms.fsdp.fsdp2 import reshards_root
from harness.forms.fsdp.units import reduce_dtype
from harness.forms.model.layout import DTYPE_BYTES, Tensor, ceil_to, elements
from harness.forms.peak_memory.step import GRADIENTS, StepTimeline, Unit, gathering
from harness.forms.terms import named_terms

FSDP1, FSDP2 = named_terms("fsdp1"), named_terms("fsdp2")


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
            self.ledger.add(FSDP1.low, size)
            self.ledger.look()
            return
        self.ledger.add(FSDP1.gathered, size)
        cast = size // self._pieces if mixed else 0
        self.ledger.briefly((FSDP1.cast, cast), gathering(self.workload, size))

    def _free(self, unit: Unit) -> None:
        if unit.name in self.there:
            self.there.discard(unit.name)
            self.ledger.drop(
                FSDP1.gathered if self._sharded else FSDP1.low, self._lengths[unit.name] * self._width
            )

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
        self.ledger.add(FSDP1.joined, size)
        self.ledger.look()
        self.ledger.drop(GRADIENTS, views)
        if self.reduces or self.workload.strategy.facts.reshards or not self._sharded:
            self._free(unit)
        if not trained:
            return
        if not self.reduces:
            if self.micro_step == 0:
                self.ledger.add(FSDP1.accumulated, size)
            self.ledger.drop(FSDP1.joined)
            return
        if self.adds_up_whole:
            self.ledger.drop(FSDP1.joined)  # added to what the micro-steps before left, in its place
            self.ledger.drop(FSDP1.accumulated, size)
            self.ledger.add(FSDP1.joined, size)
        with self.ledger.during("reduction"):
            self._reduce(size // self._width)
        self.ledger.drop(FSDP1.joined)

    def _reduce(self, length: int) -> None:
        converted = length * self._reduced if self._reduced != self._width else 0
        self.ledger.add(FSDP1.converted, converted)
        self.ledger.look()
        if self._sharded:
            self.scatter(length, self._pieces, self._reduced, FSDP1.reduced, FSDP1.reduced_low)
        elif self._reduced != self.workload.master_bytes:
            self.ledger.briefly((FSDP1.reduced, length * self.workload.master_bytes))
            self.ledger.add(FSDP1.reduced, length * self.workload.master_bytes)
        else:
            self.ledger.drop(FSDP1.converted if converted else FSDP1.joined)
            self.ledger.add(FSDP1.reduced, length * self._reduced)
        self.ledger.drop(FSDP1.converted)


class Fsdp2Timeline(StepTimeline):
    """One unit per block and the root, which encloses them."""

    def begin(self) -> None:
        super().begin()
        self._explicit = int(self.workload.options.get("prefetch") or 0)
        self._sizes: dict[str, int] = {}
        self._reduce_bytes = DTYPE_BYTES[reduce_dtype(self.workload)]

    # Forward pass

    def before_model(self) -> None:
        if self.root:
            self._gather(self.root, forward=True)
        self._gather_ahead(self.units[: self._explicit])

    def before_forward(self, unit: Unit) -> None:
        self._gather(unit, forward=True)
        following = self.units.index(unit) + 1
        self._gather_ahead(self.units[following : following + self._explicit])

    def after_forward(self, unit: Unit) -> None:
        if self.workload.strategy.facts.reshards:
            self._leave_behind(unit)

    def after_model(self) -> None:
        if self.root and self._root_reshards:
            self._leave_behind(self.root)
        self.ledger.drop(FSDP2.retained)

    # Backward pass

    def before_backward_of_model(self) -> None:
        if self.root and self._root_reshards:
            self._gather(self.root, forward=False)
        self._gather_ahead_of(len(self.units))

    def before_backward(self, unit: Unit) -> None:
        if self.workload.strategy.facts.reshards:
            self._gather(unit, forward=False)
            self._gather_ahead_of(self.units.index(unit))

    def after_backward(self, unit: Unit) -> None:
        self._free(unit)
        self._reduce(unit)

    def gradient_ready(self, parameter: Tensor) -> None:
        if self._keeps_fresh:
            self.ledger.add(GRADIENTS, parameter.numel * self.gradient_bytes)

    @property
    def _keeps_fresh(self) -> bool:
        """Whether a gradient is a tensor of its own; later micro-steps add to it where dtypes agree."""
        return not self.adds_up_whole or self._reduce_bytes != self.workload.compute_bytes

    def _drop_fresh(self, unit: Unit) -> None:
        """The root's gradients stay while blocks give back theirs."""
        if self._keeps_fresh:
            self.ledger.drop(GRADIENTS, self._trained(unit) * self.gradient_bytes)

    def after_backward_of_model(self) -> None:
        if self.root:
            self._free(self.root)
            self._reduce(self.root)
        self.ledger.drop(FSDP2.reduce_input)

    @property
    def gradient_bytes(self) -> int:
        return self.workload.compute_bytes

    @property
    def shard_stays(self) -> bool:
        """`foreach_reduce` (_fsdp_collectives.py) lets go of a shard that it copies to the host; FSDP1 keeps
        `_saved_grad_shard` until the backward pass is over."""
        moved = self.workload.offload == "cpu" and self.workload.device != "cpu"
        return super().shard_stays and not (moved and not self.workload.options.get("keeps_reduced_shards"))

    @property
    def _root_reshards(self) -> bool:
        return reshards_root(self.workload)

    def _trained(self, unit: Unit) -> int:
        return elements(unit.trained(self.workload.layout))

    def _padded(self, tensor: Tensor) -> int:
        """Elements of a parameter with its rows padded to whole shards."""
        return ceil_to(tensor.rows[0], self.workload.shards) * tensor.rows[1]

    def _size(self, unit: Unit) -> int:
        """Bytes of a gathered unit."""
        if unit.name not in self._sizes:
            sizes = (self._padded(t) * self.workload.gathered_bytes(t) for t in unit.parameters)
            self._sizes[unit.name] = sum(sizes)
        return self._sizes[unit.name]

    def _gather(self, unit: Unit, *, forward: bool) -> None:
        size = self._size(unit)
        if self.workload.shards == 1:
            self.ledger.add(FSDP2.gathered, size)
            self.ledger.look()
            return
        if unit.name not in self.there:
            self._start_gather(unit)
        self.there.discard(unit.name)
        self.ledger.drop(FSDP2.retained)
        if forward:  # what the unit before was gathered into is let go of now, this one's is kept
            self.ledger.drop(FSDP2.flat, size)
            self.ledger.add(FSDP2.retained, size)
        self.ledger.add(FSDP2.gathered, size)
        self.ledger.look()
        if not forward:
            self.ledger.drop(FSDP2.flat, size)
            self.ledger.drop(FSDP2.left_behind, self._left_behind(unit))

    def _leave_behind(self, unit: Unit) -> None:
        """Free a unit after the forward pass, but for what its group of ranks keeps of it."""
        self.ledger.add(FSDP2.left_behind, self._left_behind(unit))
        self.ledger.look()
        self._free(unit)

    def _left_behind(self, unit: Unit) -> int:
        ranks = self.workload.second_copy_ranks
        return self._size(unit) // ranks if ranks else 0

    def _start_gather(self, unit: Unit) -> None:
        size = self._size(unit)
        cast = size // self.workload.shards if self.workload.mixed else 0
        self.ledger.add(FSDP2.flat, size)
        self.ledger.briefly((FSDP2.cast, cast), gathering(self.workload, size))

    def _gather_ahead_of(self, index: int) -> None:
        """In the backward pass the unit before (`_backward_prefetch`), or as many as were asked for."""
        count = self._explicit or 1
        if self.workload.strategy.facts.reshards:
            self._gather_ahead(self.units[max(0, index - count) : index][::-1])

    def _gather_ahead(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit.name not in self.there and self.workload.shards > 1:
                self.there.add(unit.name)
                self._start_gather(unit)

    def _free(self, unit: Unit) -> None:
        self.ledger.drop(FSDP2.gathered, self._size(unit))

    def _reduce(self, unit: Unit) -> None:
        if not self.reduces:
            self._accumulate(unit)
            return
        with self.ledger.during("reduction"):
            padded = sum(map(self._padded, unit.trained(self.workload.layout)))
            self.ledger.drop(FSDP2.reduce_input)
            self.ledger.add(FSDP2.reduce_input, padded * self._reduce_bytes)
            self.ledger.look()
            self._drop_gradients(unit)
            shards = self.workload.shards
            self.scatter(
                padded, shards, self._reduce_bytes, FSDP2.reduced, FSDP2.reduced_low, sends=shards > 1
            )

    def _drop_gradients(self, unit: Unit) -> None:
        self._drop_fresh(unit)
        if self.adds_up_whole:
            self.ledger.drop(FSDP2.accumulated, self._trained(unit) * self._reduce_bytes)

    def _accumulate(self, unit: Unit) -> None:
        """Without a reduction gradients add up in the reduce dtype."""
        if self.micro_step == 0:
            self.ledger.add(FSDP2.accumulated, self._trained(unit) * self._reduce_bytes)
            self.ledger.look()
        self._drop_fresh(unit)
