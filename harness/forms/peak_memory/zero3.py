"""Peaks of ZeRO stage 3, natively and under AutoTP: gathered weights and buckets of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

from harness.backends.presets import ZERO3_DEFAULTS, ZERO3_PREFETCH_ELEMENTS
from harness.backends.tensor.plan import autotp_cut_dimension
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.model.layout import Tensor, ceil_to, elements
from harness.forms.optimizer.step import update_copies, updated_tensors
from harness.forms.peak_memory.cached_blocks import FlatUpdate, kept
from harness.forms.peak_memory.step_timeline import (
    GRADIENTS,
    STATE_SOURCE,
    Ledger,
    StepTimeline,
    Unit,
    deepspeed_norm,
    gathering,
    reduce_scattering,
)
from harness.forms.terms import named_terms
from harness.forms.workload import Workload
from harness.forms.zero.stages import bucket_elements, gradient_accumulation_bytes, reduce_dtype
from harness.forms.zero.zero3.states import SECOND_COPY, SECOND_COPY_PADDING

GATHERED, COALESCED, COPY_OF_GROUP, CONVERTED, INTERLEAVED, FLAT, WIDENED, UPDATE, KEPT = named_terms(
    "zero3", "gathered coalesced copy_of_group converted interleaved flat widened update kept"
)


class Fetching(ABC):
    """Gathers and releases as modules come."""

    def __init__(self, workload: Workload, ledger: Ledger) -> None:
        self.workload = workload
        self.ledger = ledger

    @abstractmethod
    def begin_pass(self) -> None:
        """A forward pass begins."""

    @abstractmethod
    def module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        """A module with these parameters computes next."""

    @abstractmethod
    def stay(self) -> None:
        """Modules follow whose inputs have no gradient: their post-backward hooks do not run, so that their
        weights stay until the backward pass is over (`release_backward_leftovers`)."""

    @abstractmethod
    def end_pass(self) -> None:
        """The backward pass is over."""

    @abstractmethod
    def pass_over(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        """A block with these parameters did to the ledger what the one before it did."""

    def bytes(self, tensors: tuple[Tensor, ...]) -> int:
        """Gathered, with padding to equal pieces."""
        ranks = self.workload.world_size
        return sum(ceil_to(t.numel, ranks) * self.workload.gathered_bytes(t) for t in tensors)


class LikeForLike(Fetching):
    """Each module's parameters alone: nothing is reused, persists or is gathered ahead."""

    def __init__(self, workload: Workload, ledger: Ledger) -> None:
        super().__init__(workload, ledger)
        self._current: tuple[Tensor, ...] = ()
        self._stay = False
        self._copied: set[str] = set()

    def begin_pass(self) -> None:
        """Nothing is left of the pass before."""

    def stay(self) -> None:
        self._release()
        self._current, self._stay = (), True

    def module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        if tensors == self._current:
            return
        if not self._stay:
            self._release()
        self._current = tensors
        if not tensors:
            return
        size = self.bytes(tensors)
        if len(tensors) == 1:
            self.ledger.add(GATHERED, size)
            self.ledger.briefly(gathering(self.workload, size))
            return
        # Several are gathered into one tensor, and copied out of it.
        self.ledger.add(COALESCED, size)
        self.ledger.briefly(gathering(self.workload, size))
        self.ledger.add(GATHERED, size)
        self.ledger.look()
        self.ledger.drop(COALESCED)

    def end_pass(self) -> None:
        self._release()
        self._current, self._stay = (), False

    def pass_over(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        self._copied |= {t.name for t in tensors}

    def _release(self) -> None:
        """With hpZ a weight leaves a copy in its group of ranks as it is released for the first time."""
        ranks = self.workload.second_copy_ranks
        if self.workload.offload == "cpu" and self.workload.device != "cpu":
            ranks = None  # it lies on the host
        new = tuple(t for t in self._current if t.name not in self._copied)
        if ranks and new:
            self._copied |= {t.name for t in new}
            self.ledger.add(COPY_OF_GROUP, self.bytes(new) // ranks)
            self.ledger.look()
        self.ledger.drop(GATHERED)


class WithDefaults(Fetching):
    """Up to 1e9 elements are gathered ahead and stay for the backward pass; small parameters always do.

    Each module that is fetched has the next 5e7 elements gathered (`_fetch_sub_module_impl`).
    """

    def begin_pass(self) -> None:
        threshold = ZERO3_DEFAULTS["stage3_param_persistence_threshold"]
        limit = ZERO3_DEFAULTS["stage3_max_live_parameters"]
        self._rest = [t for t in self.workload.layout.parameters if t.numel > threshold]
        self._stays = 2 * elements(self._rest) <= limit
        self._most = min(limit, elements(self._rest)) * self.workload.compute_bytes
        self._used: set[str] = set()
        self._released: set[str] = set()
        self._held = 0
        self._left = self.bytes(tuple(self._rest))
        """Bytes of what is not released."""

    def module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        threshold = ZERO3_DEFAULTS["stage3_param_persistence_threshold"]
        fetched = tuple(t for t in tensors if t.numel > threshold)
        if not fetched:
            return
        if backward:
            self._release(fetched)
            return
        first = not self._used
        self._used |= {t.name for t in fetched}
        if first:
            self._start(fetched)
        elif self._held < self._most:
            self._hold(self._most)
        if len(self._used) == len(self._rest):
            self.ledger.drop(COALESCED)

    def stay(self) -> None:
        """They are there, and stay there."""

    def _start(self, fetched: tuple[Tensor, ...]) -> None:
        """The first module's own, then what is gathered ahead of all others, in one call."""
        self._hold(self.bytes(fetched))
        ahead = tuple(t for t in self._rest if t not in fetched)
        size = min(self.bytes(ahead), ZERO3_PREFETCH_ELEMENTS * self.workload.compute_bytes)
        if len(ahead) > 1:
            self.ledger.add(COALESCED, size)
        self.ledger.briefly(gathering(self.workload, size))

    def _hold(self, size: int) -> None:
        self.ledger.drop(GATHERED)
        self._held = size
        self.ledger.add(GATHERED, size)

    def _release(self, fetched: tuple[Tensor, ...]) -> None:
        """What other modules used before in the backward pass is given back once they are done."""
        if not self._stays:
            return
        self._hold(self._left)
        self._give_back(fetched)

    def _give_back(self, fetched: tuple[Tensor, ...]) -> None:
        kept = {*self.workload.layout.tied.values(), *self._released}
        gone = tuple(t for t in fetched if t.name not in kept)
        self._released |= {t.name for t in gone}
        self._left -= self.bytes(gone)

    def pass_over(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        fetched = tuple(t for t in tensors if t.numel > ZERO3_DEFAULTS["stage3_param_persistence_threshold"])
        if backward:
            self._give_back(fetched)
        else:
            self._used |= {t.name for t in fetched}

    def end_pass(self) -> None:
        self.ledger.drop(GATHERED)
        self.ledger.drop(COALESCED)


class Zero3Timeline(StepTimeline):
    """Like for like nothing is gathered ahead or kept; with the library's defaults small models are whole."""

    last_differs = False

    def begin(self) -> None:
        super().begin()
        workload = self.workload
        if workload.like_for_like:  # else it is taken to be there from the start
            for holding in [h for h in self.ledger.held if h.name in (SECOND_COPY, SECOND_COPY_PADDING)]:
                self.ledger.drop(holding)
        self._width = workload.compute_bytes
        self._limit = bucket_elements(workload)
        self._reduced = DTYPE_BYTES[reduce_dtype(workload)]
        self._accumulated = gradient_accumulation_bytes(workload)
        self._bucket: list[Tensor] = []
        self._filled = 0
        """Elements in the bucket."""
        kind = LikeForLike if workload.like_for_like else WithDefaults
        self._fetching: Fetching = kind(workload, self.ledger)

    def keeps_gradient(self, *, host: bool) -> bool:
        return True  # `_setup_for_real_optimizer`: one of every piece, for good

    @property
    def gradient_bytes(self) -> int:
        return self._width

    def before_model(self) -> None:
        self._fetching.begin_pass()

    def before_backward_of_embedding(self) -> None:
        self._fetching.stay()

    @property
    def carried(self) -> Hashable:
        return self._filled, tuple(parameter.numel for parameter in self._bucket)

    def pass_over(self, unit: Unit, *, backward: bool) -> None:
        if self.workload.world_size > 1:
            self._fetching.pass_over(unit.parameters, backward=backward)

    def at_module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        if self.workload.world_size > 1:
            self._fetching.module(tensors, backward=backward)

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
        self._fetching.end_pass()

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
                (CONVERTED, converted),
                (INTERLEAVED, 0 if in_place else padded * self._reduced),
                reduce_scattering(self.workload, padded * self._reduced),
            )
        if count > self._limit:
            self.ledger.drop(GRADIENTS, count * self._width)

    def step(self) -> None:
        gathered = [h for h in self.ledger.held if h.kind == "gathered" and h.source == STATE_SOURCE]
        kept = {holding: self.ledger.held[holding] for holding in gathered}
        for holding in gathered:
            self.ledger.drop(holding)
        self._update_all()
        for holding, count in kept.items():
            self.ledger.add(holding, count)
            self.ledger.briefly(gathering(self.workload, count))

    def _update_all(self) -> None:
        offloads = self.workload.offload != "none"
        largest = max(-(-t.numel // self.workload.world_size) for t in self.workload.layout.trained)
        norm = deepspeed_norm(self.workload, 0 if offloads else largest)
        if not offloads and self.workload.device != "cpu":
            self._keep_blocks(norm[1])
        self.ledger.briefly(norm)
        for (piece,) in updated_tensors(self.workload):
            self.update_flat(piece, 0 if offloads else piece, FLAT, WIDENED, UPDATE)

    def _keep_blocks(self, norm: int) -> None:
        """What the allocator keeps for tensors that are flat over a whole sub-group."""
        workload, held = self.workload, self.ledger.held
        states = {
            kind: sum(
                count for term, count in held.items() if term.kind == kind and term.source == STATE_SOURCE
            )
            for kind in ("masters", "optimizer", "gradients")
        }
        if not states["masters"]:
            return
        pieces = [piece for (piece,) in updated_tensors(workload)]
        update = FlatUpdate(
            pieces=pieces,
            master=workload.master_bytes,
            gradient=self._accumulated,
            moments=states["optimizer"] // sum(pieces),
            copies=update_copies(workload),
            norm=norm,
            small=max(t.numel for t in workload.layout.trained) * self._width,
            copied_first=workload.options.get("copied_first", workload.master_bytes),
        )
        others = self.ledger.all_held - sum(states.values())
        self.ledger.keep(others + kept(update, self.ledger.kept - self.ledger.all_held))


class Zero3TensorTimeline(Zero3Timeline):
    """As `Zero3Timeline`, but autograd holds on to the weights of cut layers.

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
        cut = tensor.name.endswith(".weight") and autotp_cut_dimension(tensor.name) is not None
        return cut and self.workload.like_for_like and self.workload.world_size > 1

    def _size(self, tensor: Tensor) -> int:
        return ceil_to(tensor.numel, self.workload.world_size) * self.workload.compute_bytes
