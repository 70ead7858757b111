"""fully_shard (FSDP2) of torch 2.13: units gathered, also ahead, and their gradients reduced."""

from __future__ import annotations

from collections.abc import Sequence

from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.fsdp.fsdp2 import reshards_root
from harness.forms.fsdp.units import reduce_dtype
from harness.forms.model.layout import Tensor, elements
from harness.forms.peak_memory.step_timeline import GRADIENTS, StepTimeline, Unit, gathering
from harness.forms.terms import named_terms

GATHERED, FLAT, RETAINED, CAST, LEFT_BEHIND, REDUCE_INPUT, REDUCED, REDUCED_LOW, ACCUMULATED = named_terms(
    "fsdp2", "gathered flat retained cast left_behind reduce_input reduced reduced_low accumulated"
)


class Fsdp2Timeline(StepTimeline):
    """One unit per block and the root, which encloses them."""

    def begin(self) -> None:
        super().begin()
        self._explicit = int(self.workload.options.get("prefetch") or 0)
        self.looks_ahead = self._explicit or 1
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
        self.ledger.drop(RETAINED)

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
        self.ledger.drop(REDUCE_INPUT)

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
        shards = self.workload.shards
        return -(-tensor.rows[0] // shards) * tensor.rows[1] * shards

    def _size(self, unit: Unit) -> int:
        """Bytes of a gathered unit."""
        if unit.name not in self._sizes:
            sizes = (self._padded(t) * self.workload.gathered_bytes(t) for t in unit.parameters)
            self._sizes[unit.name] = sum(sizes)
        return self._sizes[unit.name]

    def _gather(self, unit: Unit, *, forward: bool) -> None:
        size = self._size(unit)
        if self.workload.shards == 1:
            self.ledger.add(GATHERED, size)
            self.ledger.look()
            return
        if unit.name not in self.there:
            self._start_gather(unit)
        self.there.discard(unit.name)
        self.ledger.drop(RETAINED)
        if forward:  # what the unit before was gathered into is let go of now, this one's is kept
            self.ledger.drop(FLAT, size)
            self.ledger.add(RETAINED, size)
        self.ledger.add(GATHERED, size)
        self.ledger.look()
        if not forward:
            self.ledger.drop(FLAT, size)
            self.ledger.drop(LEFT_BEHIND, self._left_behind(unit))

    def _leave_behind(self, unit: Unit) -> None:
        """Free a unit after the forward pass, but for what its group of ranks keeps of it."""
        self.ledger.add(LEFT_BEHIND, self._left_behind(unit))
        self.ledger.look()
        self._free(unit)

    def _left_behind(self, unit: Unit) -> int:
        ranks = self.workload.second_copy_ranks
        return self._size(unit) // ranks if ranks else 0

    def _start_gather(self, unit: Unit) -> None:
        size = self._size(unit)
        cast = size // self.workload.shards if self.workload.mixed else 0
        self.ledger.add(FLAT, size)
        self.ledger.briefly((CAST, cast), gathering(self.workload, size))

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
        self.ledger.drop(GATHERED, self._size(unit))

    def _reduce(self, unit: Unit) -> None:
        if not self.reduces:
            self._accumulate(unit)
            return
        with self.ledger.during("reduction"):
            padded = sum(map(self._padded, unit.trained(self.workload.layout)))
            self.ledger.drop(REDUCE_INPUT)
            self.ledger.add(REDUCE_INPUT, padded * self._reduce_bytes)
            self.ledger.look()
            self._drop_gradients(unit)
            shards = self.workload.shards
            self.scatter(padded, shards, self._reduce_bytes, REDUCED, REDUCED_LOW, sends=shards > 1)

    def _drop_gradients(self, unit: Unit) -> None:
        self._drop_fresh(unit)
        if self.adds_up_whole:
            self.ledger.drop(ACCUMULATED, self._trained(unit) * self._reduce_bytes)

    def _accumulate(self, unit: Unit) -> None:
        """Without a reduction gradients add up in the reduce dtype."""
        if self.micro_step == 0:
            self.ledger.add(ACCUMULATED, self._trained(unit) * self._reduce_bytes)
            self.ledger.look()
        self._drop_fresh(unit)
