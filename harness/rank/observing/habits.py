"""What a script does around its updates that no figure shows: gradients that it keeps or scales by hand,
schedulers, the mode of its evaluations. Of a loss it reads by what numbers its last operations divide it."""

from __future__ import annotations

import dis
import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy
import torch
from torch import Tensor, nn

from harness.backends.optimizer.gradients import local_shard
from harness.backends.piece import MOMENTS
from harness.rank.live.model_watch import depends_on_mode
from harness.rank.observing.facts import tensors_of
from harness.rank.observing.step import tensors_in
from harness.record.run import OF_PASS, OF_UPDATE

LOOKED_AT = 5
"""First updates whose gradients are looked at: each look may wait for a device."""
MOST_GAPS = 16
"""Gaps between steps that are."""
SCALED = 1e-6
"""Relative: figures of one tensor that nothing changed are equal."""
CUT = 1e-3
"""Relative: norms that were clipped to one limit are equal."""
MOST_ELEMENTS, MOST_STATES = 1024, 4
FACTORS = {"DivBackward0": 1, "MulBackward0": -1}
NOTHING = {"DivBackward0": math.nan, "MulBackward0": math.inf}
"""The divisor where that number is 0."""
CASTS = ("ToCopyBackward0", "SqueezeBackward0", "ViewBackward0")
ENDS = (("MeanBackward0", 1), ("SumBackward0", 2))
"""Of means and of sums: the node, and `reduction` of torch's losses, as their nodes keep it."""


def divisor_of(loss: Any, *, of_sum: bool = False) -> float | None:
    """What plain numbers a mean of torch's was divided by for this loss; None: it ends in no such mean.

    Reads the graph alone, and waits for no device. of_sum: a sum's instead, whose numbers a device may hold.
    """
    node, divisor = loss.grad_fn if isinstance(loss, Tensor) else None, 1.0
    while node is not None:
        name = node.name()
        if name in FACTORS:
            other = getattr(node, "_saved_other", None)
            if (
                other is None
                or other.numel() != 1
                or (other.is_cuda and not of_sum)
                or node.next_functions[1][0] is not None
            ):
                return None
            divisor *= float(other) ** FACTORS[name] if other else NOTHING[name]
        elif name == "NegBackward0":
            divisor = -divisor
        elif name not in CASTS:
            ends = ENDS[of_sum]
            is_one = name == ends[0] or getattr(node, "_saved_reduction", None) == ends[1]
            return divisor if is_one and not math.isnan(divisor) else None
        node = node.next_functions[0][0]
    return None


def _gradients(optimizer: torch.optim.Optimizer, among: Collection[int] | None = None) -> Iterator[Tensor]:
    """What this rank holds of those that an optimizer has. among: ids of parameters; None: all."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if (
            parameter.requires_grad
            and parameter.grad is not None
            and (among is None or id(parameter) in among)
        ):
            gradient = local_shard(parameter.grad)
            yield gradient.coalesce().values() if gradient.is_sparse else gradient


def _holds(optimizers: Iterable[torch.optim.Optimizer], gradient: Tensor) -> bool:
    """Whether one has this very gradient, and no other in its place."""
    pointer = gradient.data_ptr()
    return any(one.data_ptr() == pointer for optimizer in optimizers for one in _gradients(optimizer))


def _projected(gradient: Tensor) -> float:
    """A weighted sum of some elements: what ranks add up or scale, this follows."""
    some = gradient.flatten()[:: 1 + gradient.numel() // MOST_ELEMENTS].double()
    return float(some @ torch.linspace(1, 2, len(some), dtype=some.dtype, device=some.device))


def _has_changed(seen: tuple[Tensor, float] | None) -> bool:
    """Whether a gradient is no longer what it was."""
    return seen is not None and abs(_projected(seen[0]) - seen[1]) > SCALED * abs(seen[1])


@dataclass
class _Since:
    """What happened since an update of an optimizer."""

    updates: int
    passes: int = 0
    were_gone: bool = False
    """Whether a backward pass began without a gradient."""


@dataclass
class _Calls:
    """Of a scheduler."""

    since: int | None = None
    """The last update of its optimizer; None: before the first."""
    total: int = 0
    early: int = 0
    """Those before the first backward pass."""
    missed: int = 0
    """Those after updates of its optimizer's parameters by others alone."""
    per_update: Counter[int] = field(default_factory=Counter)
    """Updates by the calls before them."""
    horizon: int | None = None
    """Calls after which the schedule is over; 0: not known."""
    lengths: Sequence[int] = ()
    """What the schedule calls so."""
    are_due: bool = False
    """Whether the schedule is longer than all of them."""
    at_once: int = 1
    """Most that a library made in one of its own."""
    updates: int = 0
    """Of its optimizer, or of one with the same groups."""

    @property
    def per_update_made(self) -> int | None:
        """See `Habits.scheduler_calls`."""
        if not self.updates:
            return 0 if self.missed > 1 else None
        if self.early == 1 < self.updates == self.total and not self.since:
            return 1  # an update each, none after the last
        if self.at_once > 1 and self.updates in self.lengths:
            return self.at_once  # as long as the updates are many
        usual, times = self.per_update.most_common(1)[0] if self.per_update else (1, 0)
        return usual if usual > 1 and times > 1 and not self.are_due else None


class Habits:
    """Follows one script."""

    def __init__(self) -> None:
        self.kept_gradients = 0
        """Updates with gradients that were in those before, too."""
        self.were_scaled = False
        """Whether gradients changed between the backward pass and clipping or update."""
        self.scale = 1.0
        """By which a scaler multiplied the first loss."""
        self.is_scaled = False
        """Whether it multiplied that of the last backward pass."""
        self.still_scaled = 0
        """Of the second and third update, those given, or cut by value, while a scaler multiplies them."""
        self.figures: dict[str, float] = {}
        """Of the second and third update, `OF_PASS` and `OF_UPDATE`."""
        self.states_changed: list[int] = []
        """Of the first such, the steps whose update finds other moments than that before it left."""
        self._versions: WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Tensor, ref[Tensor], int]]] = (
            WeakKeyDictionary()
        )
        self.clipped_within = 0
        """Of the first updates, those with gradients that were cut before a micro-step added to them."""
        self.clipped_empty = 0
        """Calls of torch's clipping that got no gradient, if none got one."""
        self._has_clipped = False
        self._clips: list[set[int]] = []
        """Ids of the parameters of each call since a backward pass began."""
        self._sizes: tuple[float, float] | None = None
        """Norm and largest element of the gradients that a pass left, while a scaler multiplies them."""
        self._changed_sizes: list[tuple[tuple[float, float], tuple[float, float]]] = []
        """The same of updates whose gradients changed before they were unscaled, and what became of them."""
        self._passes: list[tuple[ref[nn.Module], ref[Tensor] | None, list[bool]]] = []
        """Training passes since one backward, their batches, and whether it reached what they return."""
        self._has_begun = False
        """Whether there was a backward pass."""
        self.left_in_training: set[int] = set()
        """Steps before which passes without gradients ran in training mode."""
        self._since: WeakKeyDictionary[torch.optim.Optimizer, _Since] = WeakKeyDictionary()
        self._schedulers: WeakKeyDictionary[Any, _Calls] = WeakKeyDictionary()
        self._calls: list[_Calls] = []
        """Of all schedulers; those of a function are freed when it returns."""
        self._called_within: Counter[int] | None = None
        self._seen: tuple[Tensor, float] | None = None
        self._before: tuple[Tensor, float] | None = None
        """The same, in clipping or an update."""
        self._cut: tuple[Tensor, float] | None = None
        self._is_added_to = False
        self._evaluated: tuple[ref[Tensor] | None, tuple[int, ...]] = None, ()
        """The batch of the pass before, or what it is cut out of, and where."""
        self._sampled_at: set[int] = set()

    def backward_begins(self, roots: Callable[[], Sequence[nn.Module]]) -> None:
        """Gradients of the updates before should be gone; masters' beside the model are overwritten."""
        self._has_begun, self._clips = True, []
        if self._cut is not None and not bool(self._cut[0].any()):
            self._cut = None  # zeroed in place
        for optimizer, since in self._since.items():
            since.passes += 1
            if since.updates <= LOOKED_AT and not since.were_gone:
                own = {id(parameter) for root in roots() for parameter in root.parameters()}
                since.were_gone = not any(bool(gradient.any()) for gradient in _gradients(optimizer, own))

    def backward_ends(self, *, goes_on: bool = False) -> None:
        """Note a gradient, to see whether the script changes it before the update.

        goes_on: whether the pass is another one of the same forward pass.
        """
        self._is_added_to |= not goes_on and _has_changed(self._cut)
        self._seen = self._sizes = None
        for optimizer, since in self._since.items():
            first = next(_gradients(optimizer), None) if since.updates <= 2 else None
            if first is not None:
                self._seen = first, _projected(first)
                self._sizes = self._measured() if self.is_scaled else None

    def _measured(self) -> tuple[float, float]:
        orders = (2, math.inf)
        held = [g for one in self._since for g in _gradients(one) if g.numel()]
        norms, largest = ([float(torch.linalg.vector_norm(g, order)) for g in held] for order in orders)
        return math.hypot(*norms), max(largest, default=0.0)

    def unscales(self) -> None:
        """A scaler is about to divide gradients: what clips them before by code of its own leaves the same
        norm, or largest element, of all."""
        if self._sizes is not None and _has_changed(self._seen):
            self._changed_sizes.append((self._sizes, self._measured()))
            if len(self._changed_sizes) == 2:
                first, second = self._changed_sizes
                were, are = numpy.isclose(first, second, rtol=CUT, atol=0)
                self.still_scaled += 2 * int((are & ~were).sum())
        self._sizes = None

    def update_begins(self) -> None:
        """Clipping or an update."""
        is_scaled = _has_changed(self._seen)
        if self.scale == 1.0:  # else a scaler changes them as it should
            if self._seen is not None and _holds(self._since, self._seen[0]):
                self.figures |= {OF_PASS: self._seen[1], OF_UPDATE: _projected(self._seen[0])}
            self.were_scaled |= is_scaled
        self._before, self._seen = None if is_scaled else self._seen, None

    def clips(self, parameters: Iterable[Any]) -> None:
        self._clips.append(set(map(id, parameters)))

    def clips_in_parts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether clipping since the backward pass took some of these parameters, and never all of them."""
        if not self._clips:
            return False
        own = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        return any(own & part for part in self._clips) and not any(own <= part for part in self._clips)

    def clipped(self, norm: Any, largest: Any) -> None:
        # Of no gradient torch makes a norm of 0 on the CPU. An infinite limit only asks for the norm.
        is_limit = largest is not None and math.isfinite(largest)
        is_empty = isinstance(norm, Tensor) and norm.device.type == "cpu" and not norm.any()
        self._has_clipped |= is_limit and not is_empty
        self.clipped_empty = 0 if self._has_clipped else self.clipped_empty + (is_limit and is_empty)
        if _has_changed(self._before) and self._before is not None:
            gradient, _ = self._before
            self._cut = gradient, _projected(gradient)

    def uses_gradients(self, of: torch.optim.Optimizer | None = None) -> None:
        """An update of this optimizer, or clipping by value: a scaler's factor should be gone by now."""
        is_plain = self.scale == 1.0 or not self.is_scaled
        if is_plain or self._before is None or getattr(of, "_step_supports_amp_scaling", False):
            return
        kept, then = self._before
        own = of is None or _holds([of], kept)
        self.still_scaled += own and bool(then) and math.isfinite(then) and not _has_changed(self._before)

    def stepping(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """An update begins: moments should be as the one before left them, if they are the same tensors."""
        self.uses_gradients(optimizer)
        for parameter, state, version in self._versions.pop(optimizer, []):
            held = state()
            if not optimizer.state.get(parameter) or (held is not None and held._version != version):
                self.states_changed += [step] if len(self.states_changed) < MOST_GAPS else []
                break

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        since = self._since.get(optimizer)
        if since is not None and since.updates <= LOOKED_AT and since.passes and not since.were_gone:
            self.kept_gradients += 1
        self.clipped_within += self._is_added_to
        self._cut, self._is_added_to = None, False
        self._since[optimizer] = _Since(1 if since is None else since.updates + 1)
        states = list(optimizer.state.items())
        self._versions[optimizer] = [
            (parameter, ref(tensor), tensor._version)
            for parameter, state in states[:: 1 + len(states) // MOST_STATES]
            for name in (*MOMENTS, "momentum_buffer")
            if isinstance(parameter, Tensor)
            and isinstance(state, dict)
            and isinstance(tensor := state.get(name), Tensor)
            and not tensor.is_inference()
        ]
        for scheduler, calls in self._schedulers.items():
            owner = _innermost(scheduler.optimizer)
            if owner is optimizer or owner.param_groups is optimizer.param_groups:
                calls.updates += 1
                if calls.since is not None:
                    calls.per_update[calls.since] += 1
                calls.since = 0
                if calls.horizon is None:
                    calls.lengths, calls.horizon = _lengths(scheduler), _horizon(scheduler)
                calls.are_due = calls.horizon >= calls.total

    def scheduled(self, scheduler: Any) -> None:
        """A scheduler is stepped without being told the epoch."""
        within = Counter[int]() if self._called_within is None else self._called_within
        within[id(scheduler)] += 1
        if within[id(scheduler)] > 1:  # Accelerate 1.15 does so once per process: count its schedules so
            self._schedulers[scheduler].at_once = within[id(scheduler)]
            return
        if (calls := self._schedulers.get(scheduler)) is None:
            calls = self._schedulers[scheduler] = _Calls()
            self._calls.append(calls)
        calls.total += bool(scheduler._step_count)  # 0: it is being made
        calls.early += bool(scheduler._step_count) and not self._has_begun
        if not calls.updates and self._since:
            own = tensors_of(scheduler.optimizer)
            calls.missed += any(own & tensors_of(other) for other in self._since)
        if calls.since is not None:
            calls.since += 1

    def library_schedules(self, begins: bool) -> None:
        """Accelerate steps a scheduler, or has."""
        self._called_within = Counter() if begins else None

    @property
    def scheduler_calls(self) -> int | None:
        """Calls of one scheduler per update, if most updates have several; 1: each precedes its update; 0:
        others alone update what its optimizer was given; None: there is none such."""
        found = [calls.per_update_made for calls in self._calls] if self._since else []
        return max((one for one in found if one is not None), default=None)

    def passes(self, root: nn.Module, batch: ref[Tensor] | None, output: Any) -> None:
        """A training pass ends: see whether a backward pass will reach what it returned."""
        reached = list[bool]()
        for one in tensors_in(output):
            if one.requires_grad and not one.is_leaf:
                one.register_hook(lambda _: reached.append(True))
        self._passes.append((ref(root), batch, reached))

    def passes_used(self, step: int) -> None:
        """A backward pass ends: passes of a module before one that it reached were evaluations."""
        used, before = dict[Any, Any](), list[tuple[nn.Module, ref[Tensor] | None]]()
        for known, batch, reached in reversed(self._passes):
            if reached:
                used[known] = batch
            elif known in used and batch is not used[known] and (root := known()) is not None:
                before.append((root, batch))
        if len(before) > 1 and step:  # a single one may be of a loss that the script leaves out
            for root, batch in before:
                self.passes_without_gradients(root, step, batch() if batch else None)
        self._passes = []

    def passes_without_gradients(self, root: nn.Module, step: int, batch: Tensor | None) -> None:
        """A pass before this step whose gradients no update takes. Passes of one batch again are samples of
        what is drawn."""
        owner, place = batch, tuple[int, ...]()
        if batch is not None and batch._base is not None:  # cut out of it anew for each pass
            owner, place = batch._base, (int(batch.storage_offset()), *batch.shape)
        known, before = self._evaluated
        again = owner is not None and known is not None and known() is owner and place == before
        self._evaluated = owner if owner is None else ref(owner), place
        if again:
            self._sampled_at.add(step)
            self.left_in_training.discard(step)
        if step in self._sampled_at:
            return
        if root.training and len(self.left_in_training) < MOST_GAPS and step not in self.left_in_training:
            # BatchNorm without momentum is averaged anew on purpose (`update_bn`).
            if any(
                one.training and getattr(one, "momentum", 0.0) is not None and depends_on_mode(one)
                for one in root.modules()
            ):
                self.left_in_training.add(step)


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):  # Accelerate's around torch's
        optimizer = optimizer.optimizer
    return optimizer


def _lengths(scheduler: Any) -> list[int]:
    known = [getattr(scheduler, name, None) for name in ("total_steps", "T_max")]
    named = (getattr(rate, "keywords", {}) for rate in getattr(scheduler, "lr_lambdas", ()))
    known += [keywords.get("num_training_steps") for keywords in named]
    return [one for one in known if isinstance(one, int)]


def _horizon(scheduler: Any) -> int:
    """See `_Calls.horizon`."""
    known = [*_lengths(scheduler), getattr(scheduler, "total_iters", None)]
    known += [one for rate in getattr(scheduler, "lr_lambdas", ()) for one in _counts(rate)]
    return max((one for one in known if isinstance(one, int)), default=0)


def _counts(rate: Any) -> Iterator[int]:
    """Whole numbers that a schedule's function reads, and products of two: one may be its length."""
    function = getattr(rate, "func", rate)
    own = getattr(rate, "keywords", {}) if function is not rate else getattr(rate, "__dict__", {})
    yield from (one for name, one in own.items() if isinstance(one, int) and "warm" not in name)
    if not inspect.isfunction(function):
        return
    variables = inspect.getclosurevars(function)
    names = {**variables.globals, **variables.nonlocals}
    before: list[Any] = []
    for one in dis.get_instructions(function):
        if one.argrepr == "*":
            before[-2:] = [math.prod(before[-2:])] if all(isinstance(n, int) for n in before[-2:]) else []
        elif one.opname == "LOAD_ATTR" and before:  # of a configuration; runs no code of the script
            before[-1] = inspect.getattr_static(before[-1], one.argval, None)
        elif one.opname == "BINARY_SUBSCR" or one.argrepr == "[]":
            held, key = before[-2:] if len(before) > 1 else ({}, "")
            before[-2:] = [held.get(key)] if isinstance(held, dict) and isinstance(key, str) else []
        elif one.opname.startswith("LOAD_"):
            before.append(names.get(one.argval, one.argval) if one.argval.__hash__ else None)
        else:
            yield from (number for number in before if isinstance(number, int))
            before.clear()
