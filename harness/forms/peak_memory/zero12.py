"""DeepSpeed 0.19.8, ZeRO stages 1 and 2: the bucket of gradients, its reduction, the update by partition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.model.layout import Tensor, ceil_to, elements
from harness.forms.peak_memory.step_timeline import GRADIENTS, StepTimeline, deepspeed_norm, gathering
from harness.forms.terms import named_terms
from harness.forms.zero.stages import bucket_elements, gradient_accumulation_bytes, reduce_dtype
from harness.forms.zero.zero12 import START_ALIGNMENT_ELEMENTS

BUCKET, FLATTENED, CONVERTED, PARTITION, FURTHER, FLAT, WIDENED, UPDATE = named_terms(
    "zero12", "bucket flattened converted partition further flat widened update"
)


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in its flat group."""

    group: int
    first: int
    """Partition that its first element is in."""
    last: int
    own: int
    """Elements in this rank's partition."""


class Zero12Timeline(StepTimeline):
    """Stage 2 reduces gradients as they come, stage 1 when the backward pass is over."""

    def begin(self) -> None:
        super().begin()
        workload = self.workload
        self.backward_alike = self.last_differs = workload.strategy.stage == 1
        self._limit = bucket_elements(workload)
        self._width = workload.compute_bytes
        self._accumulated = gradient_accumulation_bytes(workload)
        self._reduced = DTYPE_BYTES[reduce_dtype(workload)]
        self._bucket: list[Tensor] = []
        self._filled = 0
        """Elements in the bucket."""
        self._has_bucket = self._has_partition = False
        self._compact_groups: set[int] = set()
        self._pieces: list[int] = []
        self._places: dict[str, _Place] = {}
        for index, group in enumerate(workload.layout.groups()):
            self._lay_out(index, group)
        touching = (t for t in workload.layout.trained if self._places[t.name].own)
        self._touching = elements(touching)

    def _lay_out(self, index: int, group: list[Tensor]) -> None:
        ranks, rank = self.workload.world_size, self.workload.rank
        piece = ceil_to(elements(group), START_ALIGNMENT_ELEMENTS * ranks) // ranks
        position = 0
        for tensor in group:
            end = position + tensor.numel
            own = max(0, min(end, piece * (rank + 1)) - max(position, piece * rank))
            self._places[tensor.name] = _Place(index, position // piece, (end - 1) // piece, own)
            position = end
        self._pieces.append(piece)

    def keeps_gradient(self, *, host: bool) -> bool:
        return self._offloads and host

    @property
    def gradient_bytes(self) -> int:
        return self._width

    @property
    def _compact(self) -> bool:
        """`_use_compact_grad_partition_buffer`."""
        return self._accumulated > self._width

    @property
    def _offloads(self) -> bool:
        return self.workload.offload != "none"

    @property
    def _buckets(self) -> int:
        """Without contiguous gradients there is `buf_1` alone; those that wait take the room of the other."""
        contiguous = self._offloads or self.workload.options.get("contiguous_gradients") is not False
        return 2 if self.workload.options.get("overlap_comm") and contiguous else 1

    # Backward pass

    def gradient_ready(self, parameter: Tensor) -> None:
        if not self._has_bucket:
            self._has_bucket = True
            self.ledger.add(BUCKET, self._buckets * self._limit * self._width)
        if self.workload.strategy.stage == 1:
            super().gradient_ready(parameter)
            return
        self.ledger.add(GRADIENTS, parameter.numel * self._width)
        self.ledger.look()
        self._into_bucket(parameter)

    def _into_bucket(self, parameter: Tensor) -> None:
        if self._filled + parameter.numel > self._limit:
            self._reduce()
        self._bucket.append(parameter)
        self._filled += parameter.numel
        if parameter.numel <= self._limit:
            self.ledger.drop(GRADIENTS, parameter.numel * self._width)

    def _reduce(self) -> None:
        bucket, count = self._bucket, self._filled
        self._bucket, self._filled = [], 0
        if not count:
            return
        if self._compact:
            self._start_compact(bucket)
        flattened = 0 if self._is_one_slice(bucket) else count * self._width
        converted = count * self._reduced if self._reduced != self._width else 0
        with self.ledger.during("reduction"):
            self.ledger.briefly((FLATTENED, flattened), (CONVERTED, converted))
        if not self._compact and any(self._places[t.name].own for t in bucket):
            self._copy_out(bucket)
        if count > self._limit:
            self.ledger.drop(GRADIENTS, count * self._width)

    def _start_compact(self, bucket: Iterable[Tensor]) -> None:
        for group in {self._places[t.name].group for t in bucket if self._places[t.name].own}:
            if group not in self._compact_groups:
                self._compact_groups.add(group)
                self.ledger.add(PARTITION, self._pieces[group] * self._accumulated)

    def _copy_out(self, bucket: list[Tensor]) -> None:
        if self._offloads:
            largest = max(self._places[t.name].own for t in bucket)
            with self.ledger.during("reduction"):
                self.ledger.briefly(deepspeed_norm(self.workload, largest))
        elif not self._has_partition:
            self._has_partition = True
            self.ledger.add(FURTHER if self._has_accumulated else PARTITION, self._touching * self._width)
            with self.ledger.during("reduction"):
                self.ledger.look()

    @property
    def _has_accumulated(self) -> bool:
        return self.workload.strategy.stage == 2 and self.micro_step > 0

    def _is_one_slice(self, bucket: list[Tensor]) -> bool:
        """Whether everything goes to one partition, so that nothing is flattened (`average_tensor`)."""
        places = [self._places[tensor.name] for tensor in bucket]
        to = {place.first for place in places} | {place.last for place in places}
        separate = self._compact and any(place.own for place in places) and len(bucket) > 1
        return len(to) == 1 and not separate

    def after_backward_of_model(self) -> None:
        if self.workload.strategy.stage == 1:
            if not self.last_micro_step:
                return
            for group in self.workload.layout.groups():
                for tensor in group:
                    self._into_bucket(tensor)
        self._reduce()
        self.ledger.drop(FURTHER)
        self.ledger.drop(BUCKET)
        self._has_bucket = self._has_partition = False

    # Update

    def step(self) -> None:
        if not self._offloads:
            largest = max(place.own for place in self._places.values())
            self.ledger.briefly(deepspeed_norm(self.workload, largest))
        for piece in self._pieces:
            if self._compact and not self._offloads:
                self.update_flat(piece, 0, FLAT, WIDENED, UPDATE)
                self.ledger.drop(PARTITION, piece * self._accumulated)
            else:
                self.update_flat(piece, 0 if self._offloads else piece, FLAT, WIDENED, UPDATE)
        self.ledger.drop(PARTITION)
        for piece in self._pieces:
            whole = piece * self.workload.world_size * self._width
            self.ledger.briefly(gathering(self.workload, whole if self.workload.world_size > 1 else 0))
