"""Where a training script passes: its forward and backward passes, updates and clipping.

Each hook calls the listener and leaves arguments and results as they are.
"""

from __future__ import annotations

import dis
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import CO_VARARGS, CO_VARKEYWORDS
from threading import Thread, current_thread, get_ident
from types import CodeType, GeneratorType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import RandomSampler

from harness.rank.live.model_watch import in_backward
from harness.rank.observing.step import TRAINER
from harness.run_directory.observed_record import GLOO
from harness.safe_text import described

Apart = Callable[[], AbstractContextManager[None]]
"""Within its context the script's modules are not there."""


class Guarded:
    """Passes on what a script does until the listener fails once: whatever that is, it goes on unobserved.

    The listener is a `Session`, or has its methods; `ignores` may leave out what comes from a thread.

    Nothing of a process that is forked from this one, such as a loader's worker.
    """

    def __init__(self, listener: Any, apart: Apart = nullcontext) -> None:
        self._listener = listener
        self._apart = apart
        self._process = os.getpid()
        self.has_failed = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(*arguments: Any) -> None:
            if self.has_failed or os.getpid() != self._process:
                return
            with self._apart():
                try:
                    if not self._listener.ignores(name):
                        getattr(self._listener, name)(*arguments)
                except Exception as error:
                    self.has_failed = True
                    sys.stderr.write(f"harness observe: observation ends in {name}: {described(error)}\n")
                    text = f"observation ended in {name}: {type(error).__name__}: {described(error)}"
                    try:
                        self._listener.note(text)
                    except Exception as second:
                        sys.stderr.write(
                            f"harness observe: the record does not say so: {described(second)}\n"
                        )

        setattr(self, name, tell)  # to be made once
        return tell


def hook_torch(listener: Guarded) -> None:
    """Put the hooks of torch in place; they stay for the life of the process."""
    _hook_backward(listener)
    _hook_updates(listener)
    _hook_clipping(listener)
    for owner in (torch.optim.Optimizer, nn.Module):
        replace(owner, "zero_grad", told(after=lambda *_, **__: listener.gradients_zeroed()))
    replace(_BaseDataLoaderIter, "__next__", around(listener.fetching_begins, listener.fetching_ends))


class Roots:
    """Finds the outermost modules that a script calls, until a step calls no new one: looking at every module
    of every call costs time."""

    def __init__(self, listener: Guarded) -> None:
        self._listener = listener
        self.callers: WeakKeyDictionary[nn.Module, set[Thread]] = WeakKeyDictionary()
        """Each root that the script has, with the threads that call it for gradients; a teacher: none."""
        self.resting: WeakSet[nn.Module] = WeakSet()
        """Those without a parameter that trains, such as a teacher."""
        self._inside: dict[int, tuple[nn.Module, bool]] = {}
        """By thread, the root that it calls, and whether that does not train."""
        self._before_step = 0
        self._call = nn.Module.__call__

        def called(module: nn.Module, *arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or in_backward():
                return self._call(module, *arguments, **named)
            is_within = bool(self._inside)
            if is_within:
                self._listener.module_begins(module)
            elif module not in self.callers and module not in self.resting:
                self._adopt(module)
            output = self._call(module, *arguments, **named)
            if is_within:
                self._listener.module_ends(module, output)
            return output

        nn.Module.__call__ = self._called = called  # type: ignore[method-assign]

    def end_step(self) -> None:
        """A step has ended: so does the search if it brought nothing."""
        known = len(self.callers) + len(self.resting)
        # Once: Python forgets what it knows of every class of modules. Nor is what others put there ours.
        if known == self._before_step and nn.Module.__call__ is self._called:
            nn.Module.__call__ = self._call  # type: ignore[method-assign]
        self._before_step = known

    def look_again(self) -> None:
        """Another model trains, as where a script trains one after the other."""
        if nn.Module.__call__ is self._call:
            nn.Module.__call__ = self._called  # type: ignore[method-assign]
            self._before_step = -1

    def _adopt(self, module: nn.Module) -> None:
        trains = {parameter.requires_grad for parameter in module.parameters()}
        if not trains:
            return
        if True in trains:
            self.callers[module] = set()
        else:
            self.resting.add(module)
        try:
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after, always_call=True)
        except RuntimeError as error:
            self._listener.note(f"forward passes of {type(module).__name__} are not seen: {described(error)}")

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if get_ident() not in self._inside and not in_backward():
            rests = self._rests(module)
            self._inside[get_ident()] = module, rests
            if rests:
                self._listener.other_begins(module, arguments)
                return
            if torch.is_grad_enabled():
                self.callers[module].add(current_thread())
            self._listener.forward_begins(module, arguments, named)

    def _rests(self, module: nn.Module) -> bool:
        """Whether it does not train: where others do, also one that nobody called for gradients yet."""
        is_idle = module not in self.resting and not self.callers[module] and not torch.is_grad_enabled()
        return module in self.resting or (is_idle and any(self.callers.values()))

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        called, rests = self._inside.get(get_ident(), (None, False))
        if called is module:
            del self._inside[get_ident()]
            if rests:  # as it began: a pass may switch gradients on
                self._listener.other_ends()
            elif output is None and sys.exc_info()[1] is not None:
                self._listener.pass_fails()
            else:
                self._listener.forward_ends(module, output)


def _hook_backward(listener: Guarded) -> None:
    run = torch.autograd.backward

    @wraps(run)
    def backward(tensors: Any, *arguments: Any, **named: Any) -> None:
        if in_backward():  # a recomputation
            return run(tensors, *arguments, **named)
        listener.backward_begins(tensors)
        try:
            run(tensors, *arguments, **named)
        except BaseException:  # a script may go on with its next batch
            listener.pass_fails()
            raise
        listener.backward_ends()

    # `Tensor.backward` looks it up there at each call (torch 2.13, _tensor.py).
    torch.autograd.backward = backward


def _hook_updates(listener: Guarded) -> None:
    def begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        listener.update_begins()
        listener.stepping(optimizer)

    def ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        listener.stepped(optimizer)
        listener.update_ends()

    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(ends)
    hook = torch.optim.Optimizer.profile_hook_step  # makes the step of every class (torch 2.13)

    def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(step)(told(failed=listener.step_failed)(hook(step)))

    torch.optim.Optimizer.profile_hook_step = staticmethod(hooked)  # type: ignore[assignment]

    def scaler_begins(_: Any, optimizer: torch.optim.Optimizer, *__: Any, **___: Any) -> None:
        listener.unscales()
        listener.update_begins()
        listener.found(optimizer)

    def scaler_ends(*_: Any, **__: Any) -> None:
        listener.update_made()
        listener.update_ends()

    replace(torch.amp.GradScaler, "step", told(scaler_begins, scaler_ends, listener.update_ends))
    for kind in (torch.amp.GradScaler, ShardedGradScaler):  # which scales by code of its own
        replace(kind, "unscale_", told(lambda *_, **__: listener.unscales()))
        replace(kind, "scale", told(after=lambda scaled, _, outputs: listener.scaled(outputs, scaled)))
    for drawing in (DistributedSampler, RandomSampler):
        replace(drawing, "__iter__", told(lambda sampler: listener.epoch_begins(sampler)))

    def scheduled(scheduler: Any, epoch: Any = None) -> None:
        if epoch is None:
            listener.scheduled(scheduler)

    for schedule in (lr_scheduler.LRScheduler, lr_scheduler.CosineAnnealingWarmRestarts):
        replace(schedule, "step", told(scheduled))


def _hook_clipping(listener: Guarded) -> None:
    from torch.nn import utils
    from torch.nn.utils import clip_grad

    def ends(norm: Any, *arguments: Any, max_norm: Any = None, **_: Any) -> None:
        listener.clipped(norm, next(iter(arguments[1:]), None) if max_norm is None else max_norm)
        listener.update_ends()

    def begins(*_: Any, **__: Any) -> None:
        listener.update_begins()

    # FSDP1 has a method of its own, since ranks hold pieces.
    for owner in (utils, clip_grad, FullyShardedDataParallel):
        replace(owner, "clip_grad_norm_", told(begins, ends, listener.update_ends))

    def ends_with(_: Any, _parameters: Any, max_norm: Any, total_norm: Any, *__: Any, **___: Any) -> None:
        ends(total_norm, max_norm=max_norm)

    def of(run: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *arguments: Any, **named: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            listener.clips(given)
            # torch warns of a generator without parameters.
            again = (one for one in given) if isinstance(parameters, GeneratorType) else given
            return run(again, *arguments, **named)

        return clip

    for module in (utils, clip_grad):
        replace(module, "clip_grad_norm_", of)
        replace(module, "clip_grad_value_", around(listener.cuts_values, listener.update_ends))
    # The norm and the clipping by themselves, as torchtitan calls them.
    replace(utils, "clip_grads_with_norm_", told(begins, ends_with, listener.update_ends))


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def replace(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Put a wrapped function in place of one; nothing where the owner has none of that name."""
    run = getattr(owner, name, None)
    if run is not None:
        setattr(owner, name, wraps(run)(wrapper(run)))


def told(
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    failed: Callable[[], None] | None = None,
) -> Wrapper:
    """Call `before` with a function's arguments, and `after` with its result and these.

    `failed` takes the place of `after` where the function raises: the script may go on.
    """

    def wrapper(run: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if before is not None:
                before(*arguments, **named)
            try:
                result = run(*arguments, **named)
            except BaseException:
                if failed is not None:
                    failed()
                raise
            if after is not None:
                after(result, *arguments, **named)
            return result

        return called

    return wrapper


def around(begins: Callable[[], None], ends: Callable[[], None]) -> Wrapper:
    """Call these before and after a function, however it ends."""
    return told(lambda *_, **__: begins(), lambda *_, **__: ends(), ends)


OnImport = Callable[[str, Callable[[ModuleType], None]], None]


def hook_frameworks(session: Guarded, on_import: OnImport) -> None:
    """Hook each framework once it is imported."""

    def given_loss(framework: str, name: str) -> Wrapper:
        def begins(_owner: Any, loss: Any = None, *_: Any, **__: Any) -> None:
            session.driven_by(framework)
            session.framework_loss(loss, name)

        return told(begins)

    def deepspeed(module: ModuleType) -> None:
        engine = module.DeepSpeedEngine
        # Gradients are reduced after torch's backward pass has returned (DeepSpeed 0.19).
        replace(engine, "backward", around(session.engine_backward_begins, session.engine_backward_ends))
        replace(engine, "backward", given_loss("deepspeed", "DeepSpeedEngine.backward"))
        replace(engine, "step", lambda run: _updating(session, run))

    if os.environ.get(GLOO):
        on_import(
            "accelerate.state", lambda module: replace(module.PartialState, "__init__", _with_gloo(session))
        )
    on_import("accelerate.data_loader", lambda module: _loaders(session, module.BatchSamplerShard))
    accelerate = given_loss("accelerate", "Accelerator.backward")
    on_import("accelerate.accelerator", lambda module: replace(module.Accelerator, "backward", accelerate))
    told_of = around(lambda: session.library_schedules(True), lambda: session.library_schedules(False))
    on_import("accelerate.scheduler", lambda module: replace(module.AcceleratedScheduler, "step", told_of))
    on_import("deepspeed.runtime.engine", deepspeed)
    on_import("transformers.trainer", lambda module: _trainer(session, module.Trainer))
    for package in ("lightning.pytorch", "pytorch_lightning"):
        name = f"{package}.loops.optimization.automatic"
        on_import(name, lambda module: _lightning(session, module))


def _loaders(session: Guarded, kind: Any) -> None:
    """Accelerate divides batches over processes whatever their sampler does."""

    def begins(shard: Any) -> None:
        sampler = getattr(shard.batch_sampler, "sampler", None)
        times = sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1
        session.divided(shard.num_processes * times)

    replace(kind, "__iter__", told(begins))


def _with_gloo(session: Guarded) -> Wrapper:
    """Accelerate 1.15 takes a CPU process under DeepSpeed for the only one unless it is given a transport."""

    def wrapper(run: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, cpu: bool = False, **named: Any) -> None:
            if not (cpu or named.get("backend") or self._shared_state):
                session.note(
                    "Accelerate was given gloo: it takes a CPU process under DeepSpeed for the only one"
                )
            run(self, cpu, **named | {"backend": named.get("backend") or "gloo"})

        return init

    return wrapper


SHARE = "num_items_in_batch"
"""Target tokens of all micro-steps, by which a loss is to be divided where the Trainer does not divide it."""


def _trainer(session: Guarded, trainer: Any) -> None:
    """A loss of the script's own is told as it is computed, before the Trainer divides it, or does not."""
    given = trainer.compute_loss

    def wrapper(run: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(self: Any, *arguments: Any, **named: Any) -> Any:
            session.driven_by("transformers.Trainer")
            compute, own = self.compute_loss, type(self).compute_loss
            if own is given or "compute_loss" in vars(self):
                return run(self, *arguments, **named)

            def compute_loss(*inner: Any, **names: Any) -> Any:
                result = compute(*inner, **names)
                loss = result[0] if isinstance(result, tuple) else result
                items = names.get(SHARE) if reads(own, SHARE) else None
                session.framework_loss(loss, TRAINER, items, may_divide(own))
                if items is not None and self.args.average_tokens_across_devices:
                    session.share_of_all(loss, items, self.args.world_size)
                return result

            self.compute_loss = compute_loss
            try:
                return run(self, *arguments, **named)
            finally:
                del self.compute_loss

        return training_step

    replace(trainer, "training_step", wrapper)


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    """None: it is an object that can be called, or no function of Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def may_divide(function: Callable[..., Any]) -> bool:
    """Whether a function reads the number of micro-steps, under any of the names that libraries give it."""
    code = _code_of(function)
    return code is None or any(name.endswith("gradient_accumulation_steps") for name in code.co_names)


def reads(function: Callable[..., Any], name: str) -> bool:
    """Whether the code of a function reads its argument of this name, or passes on what it does not name."""
    if (code := _code_of(function)) is None:
        return True
    named = code.co_argcount + code.co_kwonlyargcount
    rest = named + bool(code.co_flags & CO_VARARGS)
    has_rest = name not in code.co_varnames[:named] and code.co_flags & CO_VARKEYWORDS
    names = {code.co_varnames[rest] if has_rest else name}
    read = (one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD_"))
    return any(names & set(value if isinstance(value, tuple) else (value,)) for value in read)


def _updating(session: Guarded, run: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed clips within its step and keeps the norm."""
    stepped = told(lambda *_, **__: session.update_begins(), failed=session.update_ends)(run)

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        updates = self.is_gradient_accumulation_boundary()
        result = stepped(self, *arguments, **named)
        norm = self.get_global_grad_norm() if updates else None
        if norm is not None:
            session.clipped(norm, self.gradient_clipping() or None)
        if updates:
            session.update_made()
        session.update_ends()
        return result

    return called


def _lightning(session: Guarded, module: ModuleType) -> None:
    make = module.ClosureResult.from_training_step_output.__func__

    @wraps(make)
    def from_training_step_output(kind: Any, output: Any, *arguments: Any, **named: Any) -> Any:
        loss = output.get("loss") if isinstance(output, dict) else output
        session.driven_by("lightning")
        session.framework_loss(loss, "Lightning's training_step")
        return make(kind, output, *arguments, **named)

    module.ClosureResult.from_training_step_output = classmethod(from_training_step_output)
