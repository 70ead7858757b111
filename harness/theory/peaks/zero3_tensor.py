"""DeepSpeed AutoTP 0.19.8 under ZeRO stage 3: what is gathered for cut layers stays for the backward pass."""

from __future__ import annotations

from harness.backends.autotp_plan import cut_dimension
from harness.theory.layout import Tensor, ceil_to
from harness.theory.peaks.course import Unit
from harness.theory.peaks.ledger import Holding
from harness.theory.peaks.zero3 import Zero3Course

KEPT = Holding(
    kind="gathered", name="weights of cut layers from their forward to their backward pass",
    formula="compute bytes x weights that a rank along 'tensor' computes with",
    source="DeepSpeed 0.19.8, module_inject/layers.py: matmul(input, weight.transpose(-1, -2)) saves a view "
    "of the gathered weight, which outlives its release",
)  # fmt: skip


class Zero3TensorCourse(Zero3Course):
    """As `Zero3Course`, but autograd holds on to the weights of cut layers.

    Recomputed blocks save them when they run again. With the library's defaults small models stay gathered.
    """

    def begin(self) -> None:
        super().begin()
        self._last: tuple[Tensor, ...] = ()

    def at_module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        if not backward and tensors != self._last:
            self._keep(self._last)
            self._last = tensors
        super().at_module(tensors, backward=backward)

    def after_model(self) -> None:
        super().after_model()
        self._keep(self._last)
        self._last = ()

    def before_backward(self, unit: Unit) -> None:
        super().before_backward(unit)
        if self._recomputes:
            self._add(unit.parameters)

    def gradient_ready(self, parameter: Tensor) -> None:
        if self._is_kept(parameter):
            self.ledger.drop(KEPT, self._size(parameter))
        super().gradient_ready(parameter)

    @property
    def _recomputes(self) -> bool:
        return bool(self.workload.activation_checkpointing)

    def _keep(self, tensors: tuple[Tensor, ...]) -> None:
        """A module was released after its forward pass; of a block that runs again nothing is saved yet."""
        inside = tuple(f"{unit.name}." for unit in self.units)
        self._add(tuple(t for t in tensors if not (self._recomputes and t.name.startswith(inside))))

    def _add(self, tensors: tuple[Tensor, ...]) -> None:
        for tensor in tensors:
            if self._is_kept(tensor):
                self.ledger.add(KEPT, self._size(tensor))

    def _is_kept(self, tensor: Tensor) -> bool:
        cut = tensor.name.endswith(".weight") and cut_dimension(tensor.name) is not None
        return cut and self.workload.like_for_like and self.workload.world_size > 1

    def _size(self, tensor: Tensor) -> int:
        return ceil_to(tensor.numel, self.workload.world_size) * self.workload.compute_bytes
