"""The fullest moments of a step by family, DDP's and a pipeline's own, and the rank that holds most.

Of a pipeline (torch 2.13, distributed/pipelining): `stage.py` keeps inputs, outputs and the graph of every
micro-batch from its forward to its backward pass (`fwd_cache`); `schedules.py` has the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.backends.presets import ZERO3_DEFAULTS, ZERO3_PREFETCH_ELEMENTS
from harness.backends.tensor.plan import autotp_cut_dimension
from harness.forms import zero0
from harness.forms.activations import ActivationProfile, Gradient, Segment, Size, no_activations
from harness.forms.ddp import wraps
from harness.forms.fsdp.fsdp1 import ALIGNMENT_BYTES, flat_unit, is_sharded
from harness.forms.fsdp.fsdp2 import reshards_root
from harness.forms.fsdp.units import reduce_dtype
from harness.forms.layout import DTYPE_BYTES, Layout, Tensor, ceil_to, derived, elements
from harness.forms.optimizers import updated_tensors
from harness.forms.peak_memory.step import (
    GRADIENTS,
    STATE_SOURCE,
    Ledger,
    Part,
    PeakMoment,
    Phase,
    Replay,
    StepTimeline,
    Unit,
    deepspeed_norm,
    gathering,
    reduce_scattering,
)
from harness.forms.pipeline import (
    cut_of,
    held,
    micro_batches_of,
    options_of,
    place_of,
    ranks_of,
    samples_at_once,
)
from harness.forms.single import normalised_apart
from harness.forms.tensor import WHOLE_GRADIENTS, local_workload
from harness.forms.terms import Term, named_terms
from harness.forms.workload import Workload
from harness.forms.zero3 import SECOND_COPY, SECOND_COPY_PADDING
from harness.forms.zero12 import places

FSDP1, FSDP2 = named_terms("fsdp1"), named_terms("fsdp2")
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
            for group in self.workload.layout.update_groups():
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
        self._kept: set[str] = set()
        """Weights that autograd holds on to."""
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
        """While a part computes its largest module is there; as it runs again, all weights that are saved."""
        self.ledger.drop(ZERO3.gathered)
        if part == "loss" or not modules:
            return
        largest = max(map(self._gathered, modules))
        runs_again = part == "block" and bool(self.workload.activation_checkpointing)
        saves = backward == runs_again
        kept = [t for module in modules for t in module if saves and self._is_kept(t, runs_again=runs_again)]
        self._kept |= {tensor.name for tensor in kept}
        self.ledger.add(ZERO3.kept, self._gathered(kept))
        is_among = self._gathered(kept) if backward else 0
        self.ledger.add(ZERO3.gathered, max(0, largest - is_among))
        self.ledger.briefly(gathering(self.workload, largest))
        # hpZ: a weight leaves a copy in its group of ranks as it is released for the first time.
        new = [t for module in modules for t in module if t.name not in self._copied]
        on_host = self.workload.offload == "cpu" and self.workload.device != "cpu"
        if not backward and (ranks := self.workload.second_copy_ranks) and not on_host:
            self._copied |= {t.name for t in new}
            self.ledger.add(ZERO3.copy_of_group, self._gathered(new) // ranks)

    def _is_kept(self, tensor: Tensor, *, runs_again: bool) -> bool:
        """Whether autograd holds on to a gathered weight: checkpointing packs detached ones as a block runs
        again (torch 2.13, utils/checkpoint.py), which outlive what is released."""
        return runs_again and len(tensor.shape) == 2 and not self.workload.layout.is_frozen(tensor)

    def _let_go(self, tensors: Sequence[Tensor]) -> None:
        kept = [tensor for tensor in tensors if tensor.name in self._kept]
        self._kept -= {tensor.name for tensor in kept}
        self.ledger.drop(ZERO3.kept, self._gathered(kept))

    def after_backward(self, unit: Unit) -> None:
        self._let_go(unit.parameters)  # frozen ones, which have no gradient

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
            whole = max((t.numel for t in rest.values()), default=0)  # each is gathered, however large
            self._hold(max(min(limit, self._rest_elements), whole) * width)
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
        self._let_go([parameter])
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
    """As `Zero3Timeline`, but autograd holds on to the weights of cut layers in any block."""

    def _is_kept(self, tensor: Tensor, *, runs_again: bool) -> bool:
        return tensor.name.endswith(".weight") and autotp_cut_dimension(tensor.name) is not None


class Fsdp1Timeline(StepTimeline):
    """One unit per block and the root, sharded or not."""

    keeps_whole = True
    casts_weights = True

    def begin(self) -> None:
        super().begin()
        workload = self.workload
        units = (*self.units, self.root)
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

    # Weights

    def before_model(self) -> None:
        self._gather(self.root)

    def before_forward(self, unit: Unit) -> None:
        self._gather(unit)
        if self.workload.options.get("forward_prefetch"):
            self._ahead(unit.place + 1)

    def after_forward(self, unit: Unit) -> None:
        if self.workload.strategy.facts.reshards or not self._sharded:
            self._free(unit)

    def after_model(self) -> None:
        if not self._sharded:
            self._free(self.root)

    def before_backward_of_model(self) -> None:
        self._gather(self.root)
        self._ahead_backward(len(self.units) - 1)

    def before_backward(self, unit: Unit) -> None:
        self._gather(unit)
        self._ahead_backward(unit.place - 1)

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

    keeps_whole = True
    casts_weights = True

    def begin(self) -> None:
        super().begin()
        self._explicit = int(self.workload.options.get("prefetch") or 0)
        self._sizes: dict[str, int] = {}
        self._reduce_bytes = DTYPE_BYTES[reduce_dtype(self.workload)]

    # Forward pass

    def before_model(self) -> None:
        self._gather(self.root, forward=True)
        self._gather_ahead(self.units[: self._explicit])

    def before_forward(self, unit: Unit) -> None:
        self._gather(unit, forward=True)
        following = unit.place + 1
        self._gather_ahead(self.units[following : following + self._explicit])

    def after_forward(self, unit: Unit) -> None:
        if self.workload.strategy.facts.reshards:
            self._leave_behind(unit)

    def after_model(self) -> None:
        if self._root_reshards:
            self._leave_behind(self.root)
        self.ledger.drop(FSDP2.retained)

    # Backward pass

    def before_backward_of_model(self) -> None:
        if self._root_reshards:
            self._gather(self.root, forward=False)
        self._gather_ahead_of(len(self.units))

    def before_backward(self, unit: Unit) -> None:
        if self.workload.strategy.facts.reshards:
            self._gather(unit, forward=False)
            self._gather_ahead_of(unit.place)

    def after_backward(self, unit: Unit) -> None:
        self._free(unit)
        self._reduce(unit)

    def gradient_ready(self, parameter: Tensor) -> None:
        if self._keeps_fresh:
            self.ledger.add(GRADIENTS, self._gradient(parameter) * self.gradient_bytes)

    @property
    def _keeps_fresh(self) -> bool:
        """Whether a gradient is a tensor of its own; later micro-steps add to it where dtypes agree."""
        return not self.adds_up_whole or self._reduce_bytes != self.workload.compute_bytes

    def _drop_fresh(self, unit: Unit) -> None:
        """The root's gradients stay while blocks give back theirs."""
        if self._keeps_fresh:
            self.ledger.drop(GRADIENTS, self._trained(unit) * self.gradient_bytes)

    def after_backward_of_model(self) -> None:
        self._free(self.root)
        self._reduce(self.root)
        self.ledger.drop(FSDP2.reduce_input)

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
        return sum(map(self._gradient, unit.trained(self.workload.layout)))

    def _gradient(self, tensor: Tensor) -> int:
        """Elements of a gradient before it is reduced."""
        return tensor.numel * self.workload.options.get(WHOLE_GRADIENTS, {}).get(tensor.name, 1)

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
            # Gradients add up in the reduce dtype.
            if self.micro_step == 0:
                self.ledger.add(FSDP2.accumulated, self._trained(unit) * self._reduce_bytes)
                self.ledger.look()
            self._drop_fresh(unit)
            return
        with self.ledger.during("reduction"):
            padded = sum(map(self._padded, unit.trained(self.workload.layout)))
            self.ledger.drop(FSDP2.reduce_input)
            self.ledger.add(FSDP2.reduce_input, padded * self._reduce_bytes)
            self.ledger.look()
            self._drop_fresh(unit)
            if self.adds_up_whole:
                self.ledger.drop(FSDP2.accumulated, self._trained(unit) * self._reduce_bytes)
            shards = self.workload.shards
            self.scatter(
                padded, shards, self._reduce_bytes, FSDP2.reduced, FSDP2.reduced_low, sends=shards > 1
            )


PIPELINE = "pipeline"
PIPELINE_TERMS = named_terms("pipeline")
EMPTY = Segment(saved=(), forward=(), backward=(), gradients=(), forward_growth=Size(), held=Size())
BUCKETS = Term(
    kind="gradients", name="gradients, as views of DDP's buckets", formula="4 P",
    source="torch 2.13, csrc/distributed/c10d/reducer.cpp: buckets stay allocated between steps",
)  # fmt: skip


class DdpTimeline(StepTimeline):
    """Buckets stay; a gradient is copied into its bucket as it comes, and freed where it is a view."""

    keeps_whole = True

    def begin(self) -> None:
        super().begin()
        if self._views:
            size = self.workload.layout.trained_count * self.workload.master_bytes
            self.ledger.add(BUCKETS, size)

    def gradient_ready(self, parameter: Tensor) -> None:
        # Under `no_sync` gradients add up beside the buckets; the last micro-step copies them in.
        if not self._views or not self.reduces:
            super().gradient_ready(parameter)
        elif self.adds_up_whole:
            self.ledger.drop(GRADIENTS, parameter.numel * self.gradient_bytes)

    @property
    def _views(self) -> bool:
        return wraps(self.workload) and self.workload.like_for_like


@dataclass(frozen=True)
class Pass:
    """A rank's pass of one micro-batch through one of its stages."""

    backward: bool
    stage: int
    """Among the stages of the rank, from 0."""


def order(workload: Workload) -> Iterator[Pass]:
    """The passes of one rank in one micro-step, in order.

    GPipe: all forward passes, then all backward passes. 1F1B: the ranks behind this one, and itself, each
    hold one micro-batch before backward and forward passes alternate (`Schedule1F1B`). Interleaved:
    micro-batches in rounds of as many as there are ranks, stage after stage (`_get_warmup_ops`).
    """
    ranks, micro = ranks_of(workload), micro_batches_of(workload)
    stages = cut_of(workload).stages // ranks
    behind = ranks - 1 - place_of(workload)
    per_round = micro // max(1, micro // ranks)
    schedule = options_of(workload).schedule
    if schedule == "gpipe":
        ahead = micro
    elif schedule == "1f1b":
        ahead = min(micro, behind + 1)
    else:
        ahead = min(micro * stages, (stages - 1) * per_round + 2 * behind + 1)
    for step in range(micro * stages + ahead):
        if step < micro * stages:
            yield Pass(False, step // per_round % stages)
        if (done := step - ahead + 1) >= 0 and done < micro * stages:
            yield Pass(True, stages - 1 - done // per_round % stages)


def pipeline_moments(
    workload: Workload, profile: ActivationProfile, ledger: Ledger
) -> dict[Phase, PeakMoment]:
    """The fullest moment of each phase, over the passes of a rank that differ."""
    assert workload.sequence_length is not None
    timeline = StepTimeline(workload, ledger)
    cut, place = cut_of(workload), place_of(workload)
    samples = samples_at_once(workload)
    table = workload.layout.parameters[0]
    replays = [
        _StageReplay(timeline, of_stage(profile, workload.layout, stage, cut.stages),
                   cut.blocks_of(stage), samples, workload.sequence_length,
                   vocabulary=table.shape[0] if stage == cut.stages - 1 else 0)
        for stage in cut.of_rank(place)
    ]  # fmt: skip
    timeline.begin()
    for each, others, first in _unlike_passes(workload, [replay.kept for replay in replays]):
        ledger.add(PIPELINE_TERMS.in_flight, others)
        replays[each.stage].go(backward=each.backward, first=first)
        ledger.drop(PIPELINE_TERMS.in_flight)
    ledger.compute(0)
    with ledger.during("step"):
        timeline.step()
    return ledger.moments()


def _unlike_passes(workload: Workload, kept: Sequence[int]) -> Iterator[tuple[Pass, int, bool]]:
    """One pass for each set of gradients that passes find: the first with most micro-batches in flight.

    Each with the bytes of those and whether its stage has no gradients yet. `kept`: bytes that a micro-batch
    in flight keeps on each stage of the rank.
    """
    in_flight, reached = [0] * len(kept), [False] * len(kept)
    found: list[tuple[Pass, int, tuple[bool, ...]]] = []
    for _ in range(min(2, workload.accumulation_steps)):
        for each in order(workload):
            in_flight[each.stage] -= each.backward
            others = sum(count * size for count, size in zip(in_flight, kept, strict=True))
            found.append((each, others, tuple(reached)))
            in_flight[each.stage] += not each.backward
            reached[each.stage] |= each.backward
    most: dict[tuple[Pass, tuple[bool, ...]], int] = {}
    for each, others, there in found:
        most[each, there] = max(others, most.get((each, there), 0))
    for each, others, there in found:
        if most.get((each, there)) == others:
            del most[each, there]
            yield each, others, not there[each.stage]


class _StageReplay(Replay):
    """One micro-batch through one stage."""

    def __init__(
        self, timeline: StepTimeline, profile: ActivationProfile, blocks: tuple[str, ...], samples: int,
        sequence: int, *, vocabulary: int,
    ) -> None:  # fmt: skip
        super().__init__(timeline, profile, micro_batch=samples, sequence=sequence)
        self._units = tuple(unit for unit in timeline.units if unit.name in blocks)
        self._logits = samples * sequence * vocabulary * timeline.workload.compute_bytes
        self.kept = profile.saved_bytes(len(blocks), samples, sequence) + self._logits
        """Bytes from the forward to the backward pass of a micro-batch."""

    def go(self, *, backward: bool, first: bool) -> None:
        """first: no gradient of the stage is there yet."""
        self._timeline.units, self._timeline.micro_step = self._units, 0 if first else 1
        if backward:
            self._ledger.add(PIPELINE_TERMS.logits, self._logits)
            self.backward()
            self._ledger.drop(PIPELINE_TERMS.logits)
        else:
            self.forward()


def of_stage(profile: ActivationProfile, layout: Layout, stage: int, stages: int) -> ActivationProfile:
    """The profile of one stage: blocks, the embedding on the first, head and loss on the last.

    A tied weight has a gradient on either end; in one process that of the head waits for the embedding's.
    """
    is_first, is_last = stage == 0, stage == stages - 1
    embedding, head = profile.embedding, profile.head
    if layout.tied:
        embedding = replace(embedding, held=Size((0, *embedding.held.coefficients[1:])))
        firsts = [Gradient(parameter=name, live=Size()) for name in dict.fromkeys(layout.tied.values())]
        head = replace(head, gradients=(*head.gradients, *firsts))
    return replace(
        profile,
        embedding=embedding if is_first else EMPTY,
        head=head if is_last else EMPTY,
        loss=profile.loss if is_last else EMPTY,
    )


TIMELINES: dict[str, type[StepTimeline]] = {
    "single": StepTimeline,
    "ddp": DdpTimeline,
    "fsdp1": Fsdp1Timeline,
    "fsdp2": Fsdp2Timeline,
    "replicate": Fsdp2Timeline,
    "zero0": Zero0Timeline,
    "zero12": Zero12Timeline,
    "zero3": Zero3Timeline,
    "zero3-tensor": Zero3TensorTimeline,
}


def has_timeline(workload: Workload) -> bool:
    """Whether the timeline of a step is known."""
    family = local_workload(workload).strategy.family
    return family == PIPELINE or family in TIMELINES


def peak_moments(
    workload: Workload, profile: ActivationProfile, ledger: Ledger | None = None
) -> dict[Phase, PeakMoment]:
    """The fullest moment of each phase of an ordinary step of one rank. `ledger`: what is told of all that
    comes and goes; None: one of its own."""
    ledger = ledger or Ledger()
    if workload.strategy.family == PIPELINE:
        return pipeline_moments(workload, profile, ledger)
    timeline, samples, length = _timeline(workload, ledger)
    Replay(timeline, profile, micro_batch=samples, sequence=length).run()
    return ledger.moments()


def _timeline(workload: Workload, ledger: Ledger) -> tuple[StepTimeline, int, int]:
    """Timeline of one rank before its step begins, its samples, and the tokens of each."""
    length = workload.part_length
    assert length is not None
    local = local_workload(workload)
    of_family = TIMELINES.get(workload.strategy.family) or TIMELINES.get(local.strategy.family, StepTimeline)
    return of_family(local, ledger), local.micro_batch_size, length


def least_peak(workload: Workload, profile: ActivationProfile) -> int:
    """Bytes below which the peak does not lie, known without the step: what is there as it begins, and what
    its forward pass keeps; 0 of a pipeline."""
    if workload.strategy.family == PIPELINE:
        return 0
    ledger = Ledger()
    timeline, samples, length = _timeline(workload, ledger)
    timeline.begin()
    return ledger.all_held + profile.forward_bytes(len(timeline.units), samples, length)


def without_activations(workload: Workload) -> int | None:
    """Bytes that the strategy itself needs at the fullest moment in which a rank computes on a GPU: model
    states, weights gathered at once, gradients before they are divided, and buffers; None: no timeline.

    Activations come on top. What an update needs for itself is left out: by then they are gone.
    """
    if not has_timeline(workload):
        return None
    on_gpu = replace(
        workload,
        device="cuda",
        transport="nccl",
        # Of a script neither need be known. Activations, which are left out, depend on the first, and what
        # arrives at a stage of a pipeline, which no script has.
        sequence_length=workload.sequence_length or 1,
        optimizer_implementation=workload.optimizer_implementation or "default",
    )
    moments = peak_moments(
        replace(on_gpu, rank=peak_rank(on_gpu)), no_activations(local_workload(on_gpu).layout)
    )
    left_out = ("activations", "data", "temporary")  # a pipeline adds logits and micro-batches in flight
    return max(
        sum(count for term, count in moment.held.items() if term.kind not in left_out)
        for phase, moment in moments.items()
        if phase != "step"
    )


def peak_rank(workload: Workload) -> int:
    """The first rank with the largest model states; under FSDP1, whose ranks differ by padding, rank 0.

    Nothing sharded: all are equal. FSDP2 and ZeRO-3 pad at the end of what they cut, so that rank 0 has most.
    ZeRO-1 and ZeRO-2: each rank keeps the whole gradient of every parameter that reaches into its partition,
    and zeros for padding.
    A pipeline: by the stages of each place. Of ranks that cut layers the first holds most of each.
    """
    family = workload.strategy.family
    if family == "pipeline":
        assert workload.mesh is not None
        places = workload.mesh.group("pipeline", 0)
        return max(places, key=lambda rank: (elements(held(replace(workload, rank=rank))), -rank))
    if family == "zero12-tensor":
        assert workload.mesh is not None
        local = local_workload(workload)
        return workload.mesh.group("data", 0)[_most_straddling(local.layout, local.world_size)]
    if family == "zero12":
        return _most_straddling(workload.layout, workload.world_size)
    return 0


@derived
def _most_straddling(layout: Layout, ranks: int) -> int:
    """Rank into whose partitions, as `zero12` lays them out, most elements reach, with whole parameters and
    padding counted."""
    touched = [0] * ranks
    for piece, placed in places(layout, ranks, 0):
        for place in placed:
            for rank in range(place.first, place.last + 1):
                touched[rank] += place.tensor.numel
        length = elements(place.tensor for place in placed)
        for rank in range(length // piece, ranks):
            touched[rank] += piece * (rank + 1) - max(length, piece * rank)
    return touched.index(max(touched))


def most_gathered_bytes(workload: Workload, width: int, blocks_at_once: int) -> int:
    """Root and the `blocks_at_once` largest blocks, at `width` bytes per element.

    The root is gathered as long as the model computes, and its blocks one after the other (torch 2.13,
    `distributed/fsdp/_fully_shard`, `_fsdp_state.py`, and FSDP1's `_runtime_utils.py`). An upper bound: each
    parameter has the larger of FSDP2's padding of its rows and FSDP1's alignment, each unit FSDP1's padding.
    """
    ranks, apart = workload.shards, normalised_apart(workload)

    def gathered(tensor: Tensor) -> int:
        own = 4 if tensor.name.rpartition(".")[0] in apart else width
        rows, size = tensor.rows
        return own * max(ceil_to(rows, ranks) * size, ceil_to(tensor.numel, ALIGNMENT_BYTES // own))

    units = workload.layout.units()
    sizes = {name: sum(map(gathered, unit)) + ranks * width for name, unit in units}
    root = sizes.pop("", 0)
    return root + sum(sorted(sizes.values(), reverse=True)[:blocks_at_once])
