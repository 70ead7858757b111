"""DeepSpeed 0.19.8: gathered weights, gradients in buckets, their reduction, the update by partition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.backends.presets import ZERO3_DEFAULTS, ZERO3_PREFETCH_ELEMENTS
from harness.backends.tensor.plan import autotp_cut_dimension
from harness.forms import zero0
from harness.forms.layout import DTYPE_BYTES, Tensor, ceil_to, elements
from harness.forms.optimizers import updated_tensors
from harness.forms.peak_memory.step import (
    GRADIENTS,
    STATE_SOURCE,
    Part,
    StepTimeline,
    deepspeed_norm,
    gathering,
    reduce_scattering,
)
from harness.forms.terms import named_terms
from harness.forms.zero3 import SECOND_COPY, SECOND_COPY_PADDING
from harness.forms.zero12 import places

ZERO0, ZERO12, ZERO3 = map(named_terms, ("zero0", "zero12", "zero3"))


class Zero0Timeline(StepTimeline):
    """Data parallelism by DeepSpeed's engine."""

    casts_weights = True

    def after_backward_of_model(self) -> None:
        if not self.last_micro_step:
            return
        reduced = DTYPE_BYTES[zero0.reduce_dtype(self.workload)]
        # `allreduce_no_retain`: a bucket is reduced once it exceeds its limit.
        bucket = held = 0
        for parameter in self.workload.layout.trained:
            held += parameter.numel
            bucket = max(bucket, held)
            if held > zero0.FALLBACK_BUCKET_ELEMENTS:
                held = 0
        converted = bucket * reduced if reduced != self.workload.compute_bytes else 0
        flattened = (ZERO0.flattened, bucket * self.workload.compute_bytes)
        with self.ledger.during("reduction"):
            self.ledger.briefly(flattened, (ZERO0.converted, converted))

    def step(self) -> None:
        if self.workload.precision == "fp32":
            super().step()
            return
        self.ledger.add(ZERO0.widened, 4 * self.workload.layout.trained_count)
        super().step()
        self.ledger.drop(ZERO0.widened)
        self.ledger.drop(GRADIENTS)


class Zero12Timeline(StepTimeline):
    """Stage 2 reduces gradients as they come, stage 1 when the backward pass is over."""

    casts_weights = True

    def begin(self) -> None:
        super().begin()
        workload = self.workload
        self._limit = zero0.bucket_elements(workload)
        self._width = workload.compute_bytes
        self._accumulated = zero0.gradient_accumulation_bytes(workload)
        self._reduced = DTYPE_BYTES[zero0.reduce_dtype(workload)]
        self._bucket: list[Tensor] = []
        self._filled = 0
        """Elements in the bucket."""
        self._has_bucket = self._has_partition = False
        self._compact_groups: set[int] = set()
        groups = places(workload.layout, workload.world_size, workload.rank)
        self._pieces = [piece for piece, _ in groups]
        self._places = {place.tensor.name: place for _, placed in groups for place in placed}
        touching = (t for t in workload.layout.trained if self._places[t.name].own)
        self._touching = elements(touching)

    def keeps_gradient(self, *, host: bool) -> bool:
        return self._offloads and host

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
            self.ledger.add(ZERO12.bucket, self._buckets * self._limit * self._width)
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
        for group in {
            self._places[t.name].group for t in bucket if self._compact and self._places[t.name].own
        }:
            if group not in self._compact_groups:
                self._compact_groups.add(group)
                self.ledger.add(ZERO12.partition, self._pieces[group] * self._accumulated)
        flattened = 0 if self._is_one_slice(bucket) else count * self._width
        converted = count * self._reduced if self._reduced != self._width else 0
        with self.ledger.during("reduction"):
            self.ledger.briefly((ZERO12.flattened, flattened), (ZERO12.converted, converted))
        if not self._compact and any(self._places[t.name].own for t in bucket):
            self._copy_out(bucket)
        if count > self._limit:
            self.ledger.drop(GRADIENTS, count * self._width)

    def _copy_out(self, bucket: list[Tensor]) -> None:
        if self._offloads:
            largest = max(self._places[t.name].own for t in bucket)
            with self.ledger.during("reduction"):
                self.ledger.briefly(deepspeed_norm(self.workload, largest))
        elif not self._has_partition:
            self._has_partition = True
            has_accumulated = self.workload.strategy.stage == 2 and self.micro_step > 0
            self.ledger.add(
                ZERO12.further if has_accumulated else ZERO12.partition, self._touching * self._width
            )
            with self.ledger.during("reduction"):
                self.ledger.look()

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
        self.ledger.drop(ZERO12.further)
        self.ledger.drop(ZERO12.bucket)
        self._has_bucket = self._has_partition = False

    # Update

    def step(self) -> None:
        if not self._offloads:
            largest = max(place.own for place in self._places.values())
            self.ledger.briefly(deepspeed_norm(self.workload, largest))
        for piece in self._pieces:
            flattened = 0 if self._compact or self._offloads else piece
            self.update_flat(piece, flattened, ZERO12.flat, ZERO12.widened, ZERO12.update)
            if self._compact and not self._offloads:
                self.ledger.drop(ZERO12.partition, piece * self._accumulated)
        self.ledger.drop(ZERO12.partition)
        for piece in self._pieces:
            whole = piece * self.workload.world_size * self._width
            self.ledger.briefly(gathering(self.workload, whole if self.workload.world_size > 1 else 0))


class Zero3Timeline(StepTimeline):
    """Stage 3: weights are gathered module by module, gradients reduced by bucket.

    Like for like a module's weights come for its own use and go after it. With the library's defaults up to
    1e9 elements stay from the forward to the backward pass, small parameters always; each module that is
    fetched has the next 5e7 elements gathered (`_fetch_sub_module_impl`).
    """

    casts_weights = True

    def begin(self) -> None:
        super().begin()
        workload = self.workload
        if workload.like_for_like:  # else it is taken to be there from the start
            for holding in [h for h in self.ledger.held if h.name in (SECOND_COPY, SECOND_COPY_PADDING)]:
                self.ledger.drop(holding)
        self._width = workload.compute_bytes
        self._limit = zero0.bucket_elements(workload)
        self._reduced = DTYPE_BYTES[zero0.reduce_dtype(workload)]
        self._bucket: list[Tensor] = []
        self._filled = 0
        """Elements in the bucket."""
        self._copied: set[str] = set()
        """Of hpZ: weights of which the group of ranks has a copy since they were released."""
        self._left: dict[str, Tensor] = {}
        """By the defaults: weights that are gathered and not given back."""
        persistent = ZERO3_DEFAULTS["stage3_param_persistence_threshold"]
        self._rest = {t.name: t for t in workload.layout.parameters if t.numel > persistent}
        """By the defaults: weights that do not stay for good."""
        self._rest_elements = elements(self._rest.values())

    def keeps_gradient(self, *, host: bool) -> bool:
        return True  # `_setup_for_real_optimizer`: one of every piece, for good

    # Weights

    def modules(self, part: Part, tensors: Sequence[Sequence[Tensor]], *, backward: bool) -> None:
        if self.workload.world_size == 1:
            return
        if self.workload.like_for_like:
            self._fetch_each(part, tensors, backward=backward)
        else:
            self._fetch_all({t.name: t for module in tensors for t in module}, backward=backward)

    def _fetch_each(self, part: Part, modules: Sequence[Sequence[Tensor]], *, backward: bool) -> None:
        """While a part computes its largest module is there; several tensors are copied out of one."""
        self.ledger.drop(ZERO3.gathered)
        if part == "loss" or not modules:
            return
        largest = max(map(self._gathered, modules))
        several = max((self._gathered(module) for module in modules if len(module) > 1), default=0)
        self.ledger.briefly((ZERO3.gathered, several), (ZERO3.coalesced, several))
        self.ledger.add(ZERO3.gathered, largest)
        self.ledger.briefly(gathering(self.workload, largest))
        # hpZ: a weight leaves a copy in its group of ranks as it is released for the first time.
        new = [t for module in modules for t in module if t.name not in self._copied]
        on_host = self.workload.offload == "cpu" and self.workload.device != "cpu"
        if not backward and (ranks := self.workload.second_copy_ranks) and not on_host:
            self._copied |= {t.name for t in new}
            self.ledger.add(ZERO3.copy_of_group, self._gathered(new) // ranks)

    def _fetch_all(self, own: dict[str, Tensor], *, backward: bool) -> None:
        limit, rest = ZERO3_DEFAULTS["stage3_max_live_parameters"], self._rest
        width = self.workload.compute_bytes
        if not backward and not self._left:
            # The first module's own, then what is gathered ahead of all others, in one call.
            self._left = rest
            ahead = [t for name, t in rest.items() if name not in own]
            size = min(self._gathered(ahead), ZERO3_PREFETCH_ELEMENTS * width)
            self.ledger.add(ZERO3.gathered, self._gathered([t for n, t in own.items() if n in rest]))
            self.ledger.briefly(
                (ZERO3.coalesced, size if len(ahead) > 1 else 0), gathering(self.workload, size)
            )
            self._hold(min(limit, self._rest_elements) * width)
        elif backward and 2 * self._rest_elements <= limit:
            # What other modules used before in the backward pass is given back once they are done.
            self._hold(self._gathered(self._left.values()))
            tied = self.workload.layout.tied.values()
            self._left = {name: t for name, t in self._left.items() if name not in own or name in tied}

    def _hold(self, size: int) -> None:
        self.ledger.drop(ZERO3.gathered)
        self.ledger.add(ZERO3.gathered, size)

    def _gathered(self, tensors: Iterable[Tensor]) -> int:
        """Bytes with padding to equal pieces."""
        ranks = self.workload.world_size
        return sum(ceil_to(t.numel, ranks) * self.workload.gathered_bytes(t) for t in tensors)

    # Gradients

    def gradient_ready(self, parameter: Tensor) -> None:
        self.ledger.add(GRADIENTS, parameter.numel * self._width)
        self.ledger.look()
        if self._bucket and self._filled + parameter.numel > self._limit:
            self._reduce()
        self._bucket.append(parameter)
        self._filled += parameter.numel
        if self._filled <= self._limit:
            self.ledger.drop(GRADIENTS, parameter.numel * self._width)

    def after_backward_of_model(self) -> None:
        # The hook of the last gradient reduces (`update_hook_state_and_maybe_run_epilogue`): the embedding's
        # weights are still there.
        self._reduce()
        self.ledger.drop(ZERO3.gathered)
        self._left = {}

    def _reduce(self) -> None:
        bucket, count = self._bucket, self._filled
        self._bucket, self._filled = [], 0
        if not bucket:
            return
        ranks = self.workload.world_size
        padded = sum(ceil_to(t.numel, ranks) for t in bucket)
        # The bucket itself is in the reduce dtype.
        converted = count * self._reduced if self._reduced != self._width and count > self._limit else 0
        in_place = len(bucket) == 1 and padded == count
        with self.ledger.during("reduction"):
            self.ledger.briefly(
                (ZERO3.converted, converted),
                (ZERO3.interleaved, 0 if in_place else padded * self._reduced),
                reduce_scattering(self.workload, padded * self._reduced),
            )
        if count > self._limit:
            self.ledger.drop(GRADIENTS, count * self._width)

    def step(self) -> None:
        gathered = [h for h in self.ledger.held if h.kind == "gathered" and h.source == STATE_SOURCE]
        kept = {holding: self.ledger.held[holding] for holding in gathered}
        for holding in gathered:
            self.ledger.drop(holding)
        offloads = self.workload.offload != "none"
        largest = max(-(-t.numel // self.workload.world_size) for t in self.workload.layout.trained)
        self.ledger.briefly(deepspeed_norm(self.workload, 0 if offloads else largest))
        for (piece,) in updated_tensors(self.workload):
            self.update_flat(piece, 0 if offloads else piece, ZERO3.flat, ZERO3.widened, ZERO3.update)
        for holding, count in kept.items():
            self.ledger.add(holding, count)
            self.ledger.briefly(gathering(self.workload, count))


class Zero3TensorTimeline(Zero3Timeline):
    """As `Zero3Timeline`, but autograd holds on to the weights of cut layers.

    Recomputed blocks save them when they run again. With the library's defaults small models stay gathered.
    """

    def modules(self, part: Part, tensors: Sequence[Sequence[Tensor]], *, backward: bool) -> None:
        super().modules(part, tensors, backward=backward)
        if backward == (part == "block" and bool(self.workload.activation_checkpointing)):
            for tensor in (tensor for module in tensors for tensor in module if self._is_kept(tensor)):
                self.ledger.add(ZERO3.kept, self._gathered([tensor]))

    def gradient_ready(self, parameter: Tensor) -> None:
        if self._is_kept(parameter):
            self.ledger.drop(ZERO3.kept, self._gathered([parameter]))
        super().gradient_ready(parameter)

    def _is_kept(self, tensor: Tensor) -> bool:
        cut = tensor.name.endswith(".weight") and autotp_cut_dimension(tensor.name) is not None
        return cut and self.workload.like_for_like and self.workload.world_size > 1
