"""One process of an observed script, from its import of torch: follows its steps and measures as the harness
measures its own.

A step begins where the update before it ended, or with its first forward pass if something else came in
between, and ends with the update. What observing takes is not in its seconds.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from threading import Thread, current_thread
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data.sampler import RandomSampler

from harness.backends.base import Engine
from harness.backends.optimizer.groups import group_rate
from harness.backends.zero.extension_builds import killed_build
from harness.forms.terms import BETWEEN, SCALAR_BYTES, may_reduce
from harness.rank.live.model_watch import depends_on_mode, in_backward
from harness.rank.live.observer import DIGESTED_STEPS, OptimizerWatch
from harness.rank.observing import facts, hooks
from harness.rank.observing.habits import MOST_GAPS, Habits, divisor_of
from harness.rank.observing.step import (
    TRAINER,
    MicroBatch,
    MicroLoss,
    Step,
    alone,
    returned_loss,
    scalar_of,
    tensors_in,
)
from harness.rank.observing.writing import Writing
from harness.rank.probes.communication import LOADERS, CollectiveKey, CommunicationCounter
from harness.rank.probes.memory import AllocatorProbe, CudaAllocatorProbe, MemoryProbe, allocator_probe
from harness.rank.probes.probes import ProbedSteps
from harness.rank.probes.time import PhaseTimer, phase_timer
from harness.record import Window
from harness.record.run import SAMPLER_SEED
from harness.run_directory.observed_record import ObserveRequest, note_end, note_start
from harness.safe_text import described

RESTS = "which does not train"
"""Ends the name of a model beside the one that trains."""
_LEFT_OUT = ", and what is measured of passes is left out"
IN_PARTS = (
    "gradients are clipped in parts, each by a norm of its own: `training.gradient_clipping` and the norm of "
    "all are n/a"
)
MULTIPLYING = (nn.Linear, nn.modules.conv._ConvNd)
ENDLESS = 10**9
"""Steps of a training whose length is not known: all windows but the last are as long as they are set."""


def trains(root: nn.Module) -> bool:
    """Whether a forward pass of this module is one of a training.

    Lightning 2.6 puts DDP into evaluation mode before its sanity check and then only what it wraps back.
    """
    return torch.is_grad_enabled() and any(module.training for module in root.modules())


def evaluates_within(root: nn.Module) -> bool:
    """Whether what this wraps is in evaluation mode as a whole: `eval()` of it leaves the wrapper's mode."""
    if any(module.training and module._parameters for module in root.modules()):
        return False  # as in most steps
    while not root._parameters:
        held = [child for child in root.children() if next(child.parameters(), None) is not None]
        if len(held) != 1:
            break
        root = held[0]
    return not any(module.training for module in root.modules())


def _origin(roots: Iterable[nn.Module]) -> tuple[Hashable, Hashable]:
    """Of a backward pass, whether it reduces gradients, as DDP and FSDP1 know, and the calls that led to it:
    the code and the place in it of each function under way."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    reduces = (
        getattr(root, "require_backward_grad_sync", getattr(root, "_sync_gradients", None)) for root in roots
    )
    return tuple(reduces), tuple((id(frame.f_code), frame.f_lasti) for frame in frames)


def _move(root: nn.Module) -> None:
    """Move every weight that trains to a number next to it, above and below by turns."""
    with torch.no_grad():
        for parameter in root.parameters():
            weight = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
            if parameter.requires_grad and weight.is_floating_point():
                places = torch.arange(weight.numel(), device=weight.device).view_as(weight)
                towards = torch.where(places % 2 == 0, torch.inf, -torch.inf).to(weight.dtype)
                weight.copy_(torch.nextafter(weight, towards))


class Probing(ProbedSteps):
    """Counts in the probed steps and until the first step begins; silent otherwise."""

    def __init__(self, counter: CommunicationCounter, allocator: AllocatorProbe) -> None:
        super().__init__(allocator, counter)
        self._is_over = False
        self._elements = self._exchanged = 0
        self._mean_elements = 0.0
        self._known: dict[CollectiveKey, int] = {}
        self._later: CommunicationCounter | None = None
        self._has_synchronised = False

    def attach(
        self, engine: Engine, elements: int, others: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Read the memory of this engine from now on. elements: of the model, which train. others: tensors of
        other models, with their kind."""
        weights = [tensor for kind, tensor in engine.state_tensors() if kind == "weights"]
        self._elements, self._mean_elements = elements, elements / max(1, len(weights))
        if any(weight.device.type == "cuda" for weight in weights):
            self.allocator.relax()
            self.allocator = CudaAllocatorProbe()
        self._memory = MemoryProbe(self.allocator, engine, others)

    def begin_step(self, step: int, window: Window) -> bool:
        """Start a step; True if it is the first after the probed ones."""
        probed = window == "probed"
        self._step = step if probed else None
        if probed:
            self._probed_steps += 1
            if not self.counter.at_work:
                self.counter.start()
            if self._memory:
                self._memory.begin()
            return False
        self.counter.stop()
        if window == "warmup":
            return False
        ended_now = not self._is_over
        if ended_now:
            self._is_over = True
            self.allocator.relax()
            if self._looks_on() and dist.is_initialized() and dist.get_world_size() > 1:
                self._later = CommunicationCounter()
                self._later.phase = BETWEEN
                self._known.clear()
                self._later.start()
        if window == "timed":
            self.found_in_timed_step(counter=self.counter.at_work, allocator=self.allocator.at_work)
        return ended_now

    def end_step(self) -> None:
        """The update is over and gradients are zeroed, where the script zeroes them now."""
        self.moment("after_step")
        if self._step is not None and self._memory is not None:
            self._add_cost("memory_gathered", self._memory.end())
        if self._step is not None:
            self._add_cost("counter", self.counter.seconds)
            self.counter.seconds = 0.0
        self._step = None

    def has_synchronised(self) -> bool:
        """Whether ranks whose passes exchange nothing have sent a byte of each weight between steps.

        Looked for until it has happened, also after the probed steps. True once. What calls of one kind send
        counts from the first one on that is as large as weights on the mean: numbers that a script gathers
        for its log are not.
        """
        if (self._is_over and self._later is None) or not self._looks_on():
            return False
        for key, count in (self._later or self.counter).counts.items():
            sent = count.payload_bytes - self._known.get(key, 0)
            self._known[key] = count.payload_bytes
            fed = key.by.endswith(RESTS) or key.by.startswith(LOADERS)
            if key.phase == BETWEEN and not fed and count.largest_bytes >= self._mean_elements:
                self._exchanged += sent
        if self._exchanged < self._elements:
            return False
        if self._later is not None:
            self._later.stop()
        self._has_synchronised = True
        return True

    @property
    def communicates_between(self) -> bool:
        """Whether the script was seen to communicate between steps, beside what feeds it and other models."""
        return any(key.phase == BETWEEN and not key.by.endswith(RESTS) for key in self.counter.counts)

    def _looks_on(self) -> bool:
        return not (self._has_synchronised or self._elements == 0) and all(
            count.largest_bytes <= SCALAR_BYTES or not may_reduce(key.phase, key.op)
            for key, count in self.counter.counts.items()
        )


class Session:
    """Listens to the hooks; see `hooks.Guarded`."""

    def __init__(self, run_directory: Path, allocator: AllocatorProbe) -> None:
        self.request = ObserveRequest.read(run_directory)
        self.counter = CommunicationCounter(packages=["__main__"])  # what a loss gathers by its own code
        self.counter.start()
        self.roots: hooks.Roots | None = None
        """The modules that the script calls, as a listener is told of them."""
        self.watch = OptimizerWatch(has_hook=False)
        self.seen, self.habits = facts.Seen(), Habits()
        self.writing = Writing(run_directory, self.request.observed, self.seen, self.habits)
        self.scheduled, self.library_schedules = self.habits.scheduled, self.habits.library_schedules
        self.clips, self.unscales = self.habits.clips, self.habits.unscales
        self.found, self.fails = self.writing.add, self.writing.fails
        self.probing = Probing(self.counter, allocator)
        self._step: Step | None = None
        self._timer: PhaseTimer | None = None
        self._last_end: float | None = None
        self._spent = self._since = 0.0
        self._fetched = self._beside = self._began_beside = 0.0
        self._depth = self._engine_depth = self._evaluations = self._optimizing = 0
        self._backward_waits = self._steps_within = self._has_stepped = False
        self._is_finished = self._has_several = self._told_of_mode = self._told_of_parts = False
        self._given: weakref.ref[Tensor] | None = None
        """The batch of the pass that is under way."""
        self._scaled: Callable[[], Tensor | None] | None = None
        self._unscaled: Tensor | None = None
        self._divisor: float | None = None
        self._rate: float | None = None
        self._causal: dict[int, bool] = {}
        self._thread: Thread | None = None
        self._others: set[Thread] = set()
        self._orders: set[int] = set()
        self._comes_again = False
        """Whether a sampler began in an order of before, and no pass has followed."""
        self._evaluating: Callable[[], nn.Module | None] | None = None
        """A root whose pass alone has gradients in this micro-step, and that or what it wraps evaluates."""

    def ignores(self, name: str) -> bool:
        """Whether this comes from a thread that trains beside the one whose steps are recorded.

        That is the first, or one that goes on once it has ended a step, or before there is one: threads may
        take turns.
        """
        thread = current_thread()
        if name in ("fails", "finish", "note") or thread is self._thread or in_backward():
            return False
        is_under_way = self._step is not None and self._step.ended is None
        if name not in ("forward_begins", "backward_begins") or not torch.is_grad_enabled():
            return thread in self._others or (is_under_way and self._thread is not None)
        if thread not in self._others and not (is_under_way and self.seen.steps):
            self._others |= {self._thread} if is_under_way and self._thread else set()
            self._thread = thread
            return False
        self._others.add(thread)
        if not self._has_several:
            self._has_several = True
            self.seen.has_form = False
            self.writing.note("several threads train: the steps of one are recorded, with the memory of all")
        return True

    def forward_begins(self, root: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        again, self._comes_again = self._comes_again, False
        batch = next((one for one in (*arguments, *named.values()) if isinstance(one, Tensor)), None)
        if not trains(root):
            if torch.is_grad_enabled() and (self._step is None or not self._step.in_micro_step):
                self._evaluating = weakref.ref(root)
            if self._step is None or self._step.ended is not None:
                self._finish()
                self._last_end = None  # an evaluation: the next step begins with its first forward pass
                if not torch.is_grad_enabled():
                    self.habits.passes_without_gradients(root, self.seen.steps, batch)
            return
        self._given = None if batch is None else weakref.ref(batch)
        self.seen.repeated_epochs += again
        step = self._open()
        evaluates = not step.in_micro_step and evaluates_within(root)
        self._evaluating = weakref.ref(root) if evaluates else None
        if not step.batches:
            self.writing.draws_from_here(step.number)
        self._repeats(step, "forward", [root] if id(root) in step.called else [])
        step.called.add(id(root))
        now = time.perf_counter()
        if not step.in_micro_step:
            step.in_micro_step = True
            if self._evaluates_again:
                return
            step.data_seconds += self._fetching(now - self._since)
            last = step.micro_steps == self.seen.accumulation - 1
            self.counter.begin_micro_step(last=last)
            if last:
                self.probing.before_forward()
            if id(root) not in self._causal:
                self._causal[id(root)] = facts.is_causal(root)
                self.writing.begins_with(root)
                if self.request.row is not None and self.request.row.is_moved and not self.seen.steps:
                    _move(root)
            fed = MicroBatch.of(arguments, named, causal=self._causal[id(root)])
            if fed is not None:
                step.batches.append(fed)
                shifts = (
                    self._causal[id(root)] and "shift_labels" not in named and step.number < DIGESTED_STEPS
                )
                step.losses[-1].shifts = shifts and facts.shifts_labels(root)
            number = step.number
            # The first ones, powers of two, and one of 64.
            if not step.micro_steps and (number < 8 or not number & min(number - 1, 63)):
                step.bits = step.bits or facts.bits_of(root)
                step.own_seconds += time.perf_counter() - now
            items = named.get("num_items_in_batch")
            if items is not None:
                step.losses[-1].items = float(items)
        self._enter("forward")

    def _repeats(self, step: Step, kind: str, roots: Sequence[nn.Module]) -> None:
        """A pass of modules that had one in this micro-step: those that gather weights do so again."""
        if self.seen.has_form and any(map(facts.gathers, roots)):
            self.seen.has_form = False
            self.writing.note(f"micro-steps have several {kind} passes: bytes are not judged")

    def forward_ends(self, root: nn.Module, output: Any) -> None:
        if self._step is None or self._step.ended is not None or not torch.is_grad_enabled():
            return
        self.writing.has_drawn()
        self.habits.passes(root, self._given, output)
        loss = returned_loss(output)
        if loss is not None:
            self._step.losses[-1].returns(loss)
        self._step.batches[-1:] = [batch.answered(output) for batch in self._step.batches[-1:]]

    def _fetching(self, waited: float) -> float:
        """Seconds of the time before a forward pass that went into its batch: those of data loaders, else
        all of it but what other models took. 0 where ranks also exchanged something then."""
        known, self._fetched = self._fetched, 0.0
        self.seen.has_loader |= known > 0
        beside, self._beside = self._beside, 0.0
        if not known and not self.probing.communicates_between:
            known = waited - beside
        return max(0.0, min(known, waited))

    def fetching_begins(self) -> None:
        self._began_beside = time.perf_counter()

    def fetching_ends(self) -> None:
        self._fetched += time.perf_counter() - self._began_beside

    def other_begins(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """A forward pass of a model that does not train."""
        self._began_beside = time.perf_counter()
        self._comes_again &= not any(p.requires_grad for p in module.parameters())  # else it evaluates
        bare = getattr(module, "module", module)
        self.counter.apart = f"{type(bare).__name__.removeprefix('FSDP')}, {RESTS}"
        has_backward = any(isinstance(one, Tensor) and one.requires_grad for one in arguments)
        if self.seen.has_form and has_backward and facts.sharded_by(module) is not None:
            self.seen.has_form = False  # its backward pass is one with the model's
            self.writing.note(f"gradients pass through a sharded {self.counter.apart}: bytes are not judged")

    def other_ends(self) -> None:
        self._beside += time.perf_counter() - self._began_beside
        self.counter.apart = ""

    def module_begins(self, module: nn.Module) -> None:
        if self.counter.apart:
            return
        kind = "cuda" if torch.cuda.is_initialized() else "cpu"
        if torch.is_autocast_enabled(kind):
            self.seen.autocast = torch.get_autocast_dtype(kind)
        elif self.seen.autocast and torch.is_grad_enabled() and isinstance(module, MULTIPLYING):
            self.seen.beside_autocast.add(module)

    def module_ends(self, module: nn.Module, output: Any) -> None:
        """One within the model that trains: whether its backward pass comes back to it."""
        if torch.is_grad_enabled() and not self.counter.apart:
            passes_back = any(one.requires_grad for one in tensors_in(output))
            (self.seen.passing_back if passes_back else self.seen.ending).add(module)

    def scaled(self, outputs: Any, scaled: Any) -> None:
        """A scaler has multiplied what backward() is then called on, or a part of it."""
        self._scaled = weakref.ref(scaled) if isinstance(scaled, Tensor) else lambda: None
        self._unscaled, self._divisor = scalar_of(outputs), divisor_of(outputs)
        if self.seen.loss_scale is None and self._unscaled is not None:
            scale = float(scaled.detach() / self._unscaled)
            self.seen.loss_scale = scale if math.isfinite(scale) else None
            self.habits.scale = self.seen.loss_scale or 1.0

    def backward_begins(self, tensors: Any) -> None:
        step, scalar, divisor = self._open(), scalar_of(tensors), divisor_of(alone(tensors))
        if "deepspeed" not in self.seen.frameworks:  # which keeps gradients elsewhere
            self.habits.backward_begins(self._called)
        root = self._evaluating() if self._evaluating is not None else None
        self._evaluating = None
        if root is not None and not self._told_of_mode and any(map(depends_on_mode, root.modules())):
            step.evaluates = step.evaluates or root
        self.habits.is_scaled = self._scaled is not None
        if self._scaled is not None:
            is_that = alone(tensors) is self._scaled()
            scalar, divisor = (self._unscaled, self._divisor) if is_that else (None, None)
            self._scaled = self._unscaled = None
        # Several passes may begin in the results of one forward pass.
        step.goes_on = self._evaluates_again or bool(step.batches and not step.in_micro_step)
        self.seen.further_passes += step.goes_on and not self._evaluates_again
        self._repeats(step, "backward", self._called() if step.goes_on else [])
        step.in_micro_step = True
        if not step.goes_on:
            step.losses[-1].scalar = scalar
            step.losses[-1].origin = _origin(self._called())
            if step.losses[-1].framework is None:
                step.losses[-1].divisor = divisor
            if step.micro_steps == self.seen.accumulation - 1:
                self.probing.moment("after_forward")
        elif not self._evaluates_again:
            step.losses[-2].add(scalar)
        self._enter("backward")

    def engine_backward_begins(self) -> None:
        """A library's backward pass begins, which does more after that of torch has ended."""
        self._engine_depth += 1

    def engine_backward_ends(self) -> None:
        self._engine_depth -= 1
        if self._engine_depth == 0 and self._backward_waits:
            self.backward_ends()

    def backward_ends(self) -> None:
        step = self._step
        self._backward_waits = self._engine_depth > 0
        if step is None or self._backward_waits:
            return
        step.in_micro_step = False
        step.called.clear()
        if "deepspeed" not in self.seen.frameworks:
            self.habits.backward_ends(goes_on=step.goes_on)
        self.habits.passes_used(step.number)
        self._evaluations += self._depth > 0
        if not step.goes_on:
            if step.micro_steps == self.seen.accumulation - 1:
                self.probing.moment("after_backward")
            step.micro_steps += 1
            step.losses.append(MicroLoss())
        self._enter("step" if self._depth else None)
        self._since = time.perf_counter()
        self._fetched = self._beside = 0.0
        if self._steps_within:
            self._close(step)

    def pass_fails(self) -> None:
        """It raises, as where memory runs out: if the script goes on, its next passes are this micro-step."""
        step = self._step
        self._backward_waits = False
        self.habits.passes_used(0)
        if step is None or step.ended is not None or step.goes_on or not torch.is_grad_enabled():
            return
        step.in_micro_step = False
        del step.batches[step.micro_steps :]
        step.losses[-1] = MicroLoss()
        self._enter("step" if self._depth else None)

    def driven_by(self, framework: str) -> None:
        """A library drives the training."""
        self.seen.frameworks[framework] = None

    def framework_loss(self, loss: Any, name: str, items: Any = None, divided: bool = False) -> None:
        """A framework was given this loss to divide and to call backward on.

        items: tokens of all micro-steps by which the loss was divided already; divided: whether the script
        may have divided it by their number.
        """
        if isinstance(loss, Tensor) and loss.numel() == 1:
            current = self._open().losses[-1]
            if current.framework_name != TRAINER:  # which knows it before it is divided
                current.framework, current.framework_name = loss.detach().clone(), name
                current.may_be_divided = name != TRAINER or divided
                current.divisor = divisor_of(loss)
            if items is not None:
                current.items = float(items)

    def share_of_all(self, loss: Any, items: Any, ranks: int) -> None:
        """A script's own loss, which is to be `ranks` times its share of these target tokens of all ranks."""
        if self.seen.steps < DIGESTED_STEPS and ranks > 1:
            divisor = divisor_of(loss, of_sum=True)
            self._open().losses[-1].lacks_world = divisor is not None and divisor == float(items)

    def epoch_begins(self, sampler: Any) -> None:
        """A sampler that draws an order, or divides samples over ranks, is gone through."""
        if isinstance(sampler, RandomSampler):
            generator = torch.default_generator if sampler.generator is None else sampler.generator
            order: Any = generator.get_state().numpy().tobytes()
            if not sampler.replacement and len(self.seen.shuffles) < MOST_GAPS:
                is_over = self._step is not None and self._step.ended is not None
                self.seen.shuffles.append(self.seen.steps + is_over)
        else:
            self.divided(min(sampler.num_replicas, dist.get_world_size() if dist.is_initialized() else 1))
            order = sampler.shuffle and (sampler.seed, sampler.epoch, len(sampler.dataset))
            if order and sampler.num_replicas > 1:
                self.habits.figures[SAMPLER_SEED] = sampler.seed
        self._comes_again = bool(order) and hash(order) in self._orders
        self._orders.add(hash(order))

    def divided(self, parts: int) -> None:
        """A loader divides its samples into so many parts, one for each rank."""
        self.seen.parts = max(self.seen.parts, parts)

    def update_begins(self) -> None:
        self._depth += 1
        step = self._step
        if self._depth == 1:
            self.habits.update_begins()
        self._evaluations *= self._depth > 1
        if self._depth != 1 or step is None or in_backward():
            return
        if step.ended is None and step.micro_steps:
            self._enter("step")

    def update_ends(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._step is not None:
            if self._has_stepped:
                self._close(self._step)
            elif self._step.ended is None:
                self._enter(None)
                self._since = time.perf_counter()  # DeepSpeed's step after each micro-step is no fetching

    @property
    def _evaluates_again(self) -> bool:
        """Whether an optimizer asks again for the gradients of a micro-step, as LBFGS does."""
        again = self._depth > 0 and self._evaluations > 0
        self.seen.has_form &= not again
        return again

    def update_made(self) -> None:
        """A library has made its update or skipped it, since gradients are not finite: that is a step too."""
        self._has_stepped = True
        self.seen.rates = {}

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an update: afterwards a scheduler of its hooks may have set the next rate."""
        self.seen.has_form &= not self._optimizing  # one within another, as ZeroRedundancyOptimizer has it
        self._optimizing += 1
        if self.writing.add(optimizer) and self.roots:
            self.roots.look_again()
        if "deepspeed" not in self.seen.frameworks:
            self.habits.stepping(optimizer, self.seen.steps)
        if self.habits.clips_in_parts(optimizer):
            if not self._told_of_parts:
                self.writing.note(IN_PARTS)
            self._told_of_parts, self.seen.clipping = True, None
            if self._step is not None:
                self._step.norm = None
        filled = (group for group in optimizer.param_groups if group["params"])
        self._rate = next((rate for group in filled if (rate := group_rate(group)) is not None), None)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._has_stepped = True
        self._optimizing -= 1
        self.habits.stepped(optimizer)
        if self.watch.at_work:
            self.watch.look(optimizer)
        if self._step is not None:
            self._step.rate = self._rate if self._step.rate is None else self._step.rate
            self._step.group_rates |= self.seen.rates
        self.seen.rates = {}

    def step_failed(self) -> None:
        """It has raised: there is no update."""
        self._optimizing -= 1
        self.update_ends()

    def cuts_values(self) -> None:
        self.update_begins()
        self.habits.uses_gradients()

    def clipped(self, norm: Any, largest: Any) -> None:
        self.seen.clipping = None if largest is None else float(largest)
        self.habits.clipped(norm, largest)
        if self._step is not None:
            self._step.norm = norm.detach() if isinstance(norm, Tensor) else norm

    def gradients_zeroed(self) -> None:
        step = self._step
        if step is None or self._depth:
            return
        if step.ended is not None:
            self._finish()
        elif step.micro_steps and not step.in_micro_step and self.writing.are_gradients_gone():
            self.seen.discarded += step.micro_steps  # such as a batch whose loss is not finite
            step.begin_again()

    def finish(self, failure: BaseException | None = None) -> None:
        """The process ends; `failure` is the exception that ends it. The first call counts."""
        if not self._is_finished:
            self._is_finished = True
            self._finish()
            if self.probing.has_synchronised():
                self.writing.synchronised(self.seen.steps)
            self.writing.end(failure, self._step, self.probing)

    def note(self, text: str) -> None:
        """Something happened that a reader of the figures must know."""
        if not self._is_finished:
            self.writing.note(text)

    def _open(self) -> Step:
        """The step that is under way; begins one where the last has ended."""
        if self._step is not None and self._step.ended is None:
            return self._step
        self._finish()
        begin = time.perf_counter()
        self.writing.join(self._called())
        if self._timer is None:
            self._timer = phase_timer(self.writing.world.device)
        window = self.request.measure.window(self.seen.steps, ENDLESS)
        if self.probing.has_synchronised():
            self.writing.synchronised(self.seen.steps)
        if self.probing.begin_step(self.seen.steps, window):
            self.writing.measured(self.probing)
        if self.seen.steps < DIGESTED_STEPS:
            self.watch.start()
        self._spent += time.perf_counter() - begin
        first = self._last_end is None
        began = time.perf_counter() if self._last_end is None else self._last_end
        self._since = began + (0.0 if first else self._spent)
        self._step = Step(
            number=self.seen.steps, window=window, began=began, own_seconds=0.0 if first else self._spent
        )
        self._spent = 0.0
        return self._step

    def _close(self, step: Step) -> None:
        """The update has ended, or another optimizer's after it."""
        self._has_stepped = False
        self._steps_within = in_backward()
        if self._steps_within:
            self.seen.has_form = False
            return  # an optimizer of each parameter steps as its gradient is ready; the pass ends the step
        if step.micro_steps == 0:
            self.seen.bare_updates += 1
            return  # a step without a backward pass, as libraries make one to set up their states
        self._enter(None)
        if self.writing.world.device == "cuda":
            torch.cuda.synchronize()
        step.ended = self._last_end = time.perf_counter()
        if step.evaluates is not None and not self._told_of_mode:
            self._told_of_mode = True
            self.seen.evaluating_since = step.number
            left_out = "" if step.evaluates.training else _LEFT_OUT
            self.writing.note(
                f"step {step.number} trains {type(step.evaluates).__name__} in evaluation mode: dropout is "
                f"off, BatchNorm takes its running statistics{left_out}; call train() on it, also after each "
                "evaluation"
            )
        self.counter.phase = BETWEEN
        step.figures |= self.habits.figures
        self.habits.figures = {}

    def _finish(self) -> None:
        """Write the step that has ended."""
        step = self._step
        if step is None or step.ended is None or self._timer is None:
            return
        begin = time.perf_counter()
        self.probing.end_step()
        applied = None
        if self.watch.at_work:
            applied = self.watch.stop()
            if applied is not None:  # else a scaler skipped the update
                self.seen.updated_tensors = max(self.seen.updated_tensors or 0, self.watch.with_gradient)
        self.seen.accumulation = step.micro_steps
        self.seen.steps += 1
        self._step = None
        is_described = self.writing.described is not None
        self.writing.join(self._called())
        self.writing.step(step, self._timer.take(), applied)
        if self.roots:
            self.roots.end_step()
        if not is_described and (found := self.writing.described) is not None:
            self.probing.attach(found.live.engine, found.trained_elements, self._outside)
        self._spent += time.perf_counter() - begin

    def _outside(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of the models that the script calls; those of the described one count as its own before."""
        roots = self.roots
        idle = [root for root, threads in roots.callers.items() if not threads] if roots else []
        for module in (*self._called(), *idle, *(roots.resting if roots else ())):
            for tensor in facts.weights_of(module):
                yield "other_models", tensor

    def _called(self) -> list[nn.Module]:
        """Roots that a thread calls which is not ignored."""
        callers = self.roots.callers.items() if self.roots else ()
        return [root for root, threads in callers if threads - self._others]

    def _enter(self, phase: str | None) -> None:
        if self._timer is not None:
            self._timer.enter(phase)
        self.counter.phase = phase or BETWEEN


def start_observing(run_directory: Path, on_import: hooks.OnImport, apart: hooks.Apart = nullcontext) -> None:
    """Put hooks into torch now and into frameworks once they are imported; they work within `apart()`.

    The CPU's allocator counts from here, before the first tensor; on CUDA its own statistics are read.
    """
    session = Session(run_directory, allocator_probe("cpu"))
    rank = os.environ.get("RANK", "")
    note_start(run_directory, int(rank) if rank.isdecimal() else None, trains=False)
    guarded = hooks.Guarded(session, apart)
    session.roots = hooks.Roots(guarded)
    hooks.hook_torch(guarded)
    hooks.hook_frameworks(guarded, on_import)

    def waits(baton: Any) -> None:
        """A row ends where it would wait without end."""
        if why := killed_build(Path(baton.lock_file_path)):
            if session.request.row is not None:
                raise RuntimeError(why)
            sys.stderr.write(f"harness observe: {why}\n")

    wrapped = hooks.told(waits)
    on_import("torch.utils.file_baton", lambda module: hooks.replace(module.FileBaton, "wait", wrapped))
    _hook_end(guarded, run_directory, apart)
    shown: Callable[[Any], Any] = threading.excepthook

    def note(arguments: Any) -> None:
        """The exit code of the process does not tell of exceptions that end a thread."""
        shown(arguments)
        error = arguments.exc_value
        if error is not None and not isinstance(error, SystemExit):
            guarded.note(f"a thread ended with {type(error).__name__}: {described(error)}")

    threading.excepthook = note


def _hook_end(guarded: hooks.Guarded, run_directory: Path, apart: hooks.Apart) -> None:
    """Finish when the process ends, however it does that."""
    failures: list[BaseException] = []
    shown, leave, process = sys.excepthook, os._exit, os.getpid()

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failures.append(error)
        guarded.fails(error)
        shown(kind, error, trace)

    def failure() -> BaseException | None:
        """What ends the process; Python keeps it too, in case the script has replaced our hook."""
        return failures[0] if failures else getattr(sys, "last_value", None)

    @wraps(leave)
    def exit_at_once(status: int) -> NoReturn:
        # A watchdog's thread leaves so while the others hang: what could wait is left out there.
        if os.getpid() == process and threading.current_thread() is threading.main_thread():
            try:
                with apart():
                    note_end(run_directory, process, status)
            except OSError as error:
                sys.stderr.write(f"harness observe: the exit code is not noted: {described(error)}\n")
            if status == 0 or failure() is not None:
                guarded.finish(failure())
        leave(status)

    sys.excepthook = note
    os._exit = exit_at_once
    atexit.register(lambda: guarded.finish(failure()))
