"""Engines whose forward, backward and update are steps of Trainer's own loop."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from harness.backends.accelerate import AccelerateZeroEngine, forget_accelerator
from harness.backends.base import BackendOptions, Batch, BuildOptimizer, SetupContext
from harness.backends.ddp import DdpEngine
from harness.backends.fsdp.fsdp1 import Fsdp1Engine
from harness.backends.model.precision import scaler_arguments
from harness.backends.optimizer.groups import set_rates
from harness.backends.options import reduces_each
from harness.backends.torch_engine import TorchEngine

from ..fsdp.fsdp2 import Fsdp2Engine


class Ended(BaseException):
    """Unwinds the library's loop. No `Exception`, so that the library does not handle it."""


class Handover:
    """Runs a function on a thread that works only while the caller waits in `call`, and the other way round.

    Neither side ever runs at the same time as the other, so that phases, memory and collectives that are
    measured between two calls belong to what ran between them.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._to_work = threading.Semaphore(0)
        self._to_caller = threading.Semaphore(0)
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = False
        # What torch keeps by thread.
        self._threads = torch.get_num_threads()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, name="library's loop", daemon=True)
        self._thread.start()

    def call(self, value: Any = None) -> Any:
        """The caller's side: hand over `value` and wait for the answer. Raises what the loop raised."""
        self._value = value
        self._to_work.release()
        self._to_caller.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        answer, self._value = self._value, None
        return answer

    def answer(self, value: Any = None) -> Any:
        """The loop's side: answer the last call and wait for the next, whose value is returned."""
        self._value = value
        del value  # the caller's from here on
        self._to_caller.release()
        self._to_work.acquire()
        if self._ended:
            raise Ended
        given, self._value = self._value, None
        return given

    def end(self) -> None:
        """Unwind the loop and wait for its thread."""
        self._ended = True
        self._to_work.release()
        self._thread.join()

    def _run(self) -> None:
        self._to_work.acquire()
        try:
            if self._ended:
                return
            torch.set_num_threads(self._threads)
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._work()
            raise RuntimeError("the library's loop ended before its last step")
        except Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # and with it the model
            self._to_caller.release()


class GivenRates(LRScheduler):
    """Leaves the rates as they are: they are set before each update. Trainer steps it after each one."""

    def get_lr(self) -> list[float | Tensor]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def steps_taken(self) -> int:
        """Steps that Trainer took; the constructor takes one of its own."""
        return self._step_count - 1


ENDLESS = 10**9
"""Optimizer steps that Trainer is asked for: the caller ends the training."""
WRAPPER = "_fsdp_wrapped_module."


class Feed:
    """In the place of a DataLoader: no length, and one item per micro-step, which holds no data.

    Trainer asks for all items of an optimizer step at once (`get_batch_samples`); the first waits until the
    caller has a batch. The batch itself reaches `compute_loss`.
    """

    def __init__(self, accumulation_steps: int, wait: Callable[[], None]) -> None:
        self._accumulation_steps = accumulation_steps
        self._wait = wait

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            self._wait()
            for _ in range(self._accumulation_steps):
                yield {"input_ids": torch.empty(0, dtype=torch.int64)}


class HeldTrainer(Trainer):
    """A Trainer whose loop runs on a thread of its own and waits for the caller; see `Handover`."""

    loss_is_scaled_for_ga = True  # the caller normalises by the target tokens of the global batch
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: nn.Module,
        arguments: TrainingArguments,
        context: SetupContext,
        build_optimizer: BuildOptimizer,
    ) -> None:
        self._context = context
        self._build_optimizer = build_optimizer
        self._handover = Handover(self.train)
        self._batch: Any = None
        self._norm: Any = None
        self._stepped = False
        super().__init__(model=model, args=arguments)
        self.remove_callback(PrinterCallback)
        if self.accelerator.scaler is not None:
            # TrainingArguments has no settings of the loss scaler.
            constants, scaler = scaler_arguments(context.loss_scale), self.accelerator.scaler
            scaler.load_state_dict(scaler.state_dict() | constants | {"scale": constants["init_scale"]})

    def start(self) -> None:
        """Let Trainer prepare everything, up to the first batch."""
        self._handover.call()

    def forward(self, batch: Any) -> Tensor:
        """The loss of a micro-step as the job computes it, inside Trainer's `training_step`."""
        loss: Tensor = self._handover.call(batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Let `training_step` go on with this loss, up to where clipping begins."""
        self._handover.call(loss)

    def step(self) -> float:
        """Let Trainer clip and update; the gradient norm that it got."""
        self._handover.call()
        return float(self._norm)

    def close(self) -> None:
        """End Trainer's loop where it waits."""
        self._handover.end()

    def hold_before(self, owner: Any, name: str) -> None:
        """Wait before a method that takes the optimizer step within `training_step`, as DeepSpeed's does."""
        run = getattr(owner, name)

        def held() -> Any:
            self._handover.answer()
            self._stepped = True
            return run()

        setattr(owner, name, held)

    # Extension points of Trainer

    def get_train_dataloader(self) -> Any:
        return Feed(self.args.gradient_accumulation_steps, self._take_batch)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            whole: Any = self.model if model is None else model
            named = whole.named_parameters()
            self.optimizer = self._build_optimizer((name.replace(WRAPPER, ""), p) for name, p in named)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            stepped: Any = optimizer or self.optimizer
            rates: Any = GivenRates(stepped)
            self.lr_scheduler = rates
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        batch, self._batch = self._batch, None
        return self._handover.answer(self._context.compute_loss(model, batch))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self._stepped:
            self._take_batch()  # after the last micro-step the caller gives none, but steps
        self._stepped = False
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        self._norm = super()._get_grad_norm(model, grad_norm)
        return self._norm

    def _take_batch(self) -> None:
        self._batch = self._handover.answer()


def reduced_as(options: BackendOptions) -> dict[str, Any]:
    """Trainer's argument by which it reduces gradients in every micro-step; nothing where it need not."""
    each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return {"accelerator_config": each} if reduces_each(options) else {}


def training_arguments(context: SetupContext, **more: Any) -> TrainingArguments:
    """The job as Trainer's arguments: silent, without a checkpoint, and without an end of its own."""
    return TrainingArguments(
        output_dir=tempfile.gettempdir(),  # is created, and stays as it is
        use_cpu=context.world.device == "cpu",
        ddp_backend=torch.distributed.get_backend(),
        per_device_train_batch_size=context.micro_batch_size,
        gradient_accumulation_steps=context.accumulation_steps,
        max_steps=ENDLESS,
        seed=torch.initial_seed() % 2**32,  # Trainer seeds every generator anew
        **{
            "max_grad_norm": context.gradient_clipping or 0.0,
            "bf16": context.precision == "bf16-mixed",
            "fp16": context.precision == "fp16-mixed",
            **more,
        },
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


class TrainerTorchEngine(TorchEngine):
    """What Trainer does with an optimizer of torch's own: clipping, unscaling and update are its."""

    own_thread = True

    def __init__(self, trainer: HeldTrainer, *args: Any) -> None:
        super().__init__(*args)
        self.trainer = trainer
        self.strategy.details.update(details_of(trainer))

    def forward(self, batch: Batch) -> Tensor:
        # Trainer's `evaluate` is another loop; the wrapped model is the same.
        return self.trainer.forward(batch) if torch.is_grad_enabled() else super().forward(batch)

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        self.trainer.backward(loss)
        self._micro_steps = 0 if last_micro_step else self._micro_steps + 1

    def step(self, lr: float) -> float:
        set_rates(self.optimizer, lr)
        return self.trainer.step()

    def close(self) -> None:
        self.trainer.close()
        forget_accelerator()


class TrainerDdpEngine(TrainerTorchEngine, DdpEngine):
    """DDP as Trainer has Accelerate prepare it."""


class TrainerFsdp2Engine(TrainerTorchEngine, Fsdp2Engine):
    """fully_shard as Trainer has Accelerate prepare it."""


class TrainerFsdp1Engine(TrainerTorchEngine, Fsdp1Engine):
    """FSDP1 as Trainer has Accelerate prepare it."""


class TrainerZeroEngine(AccelerateZeroEngine):
    """DeepSpeed as Trainer has Accelerate prepare it."""

    own_thread = True

    def __init__(self, trainer: HeldTrainer, *args: Any) -> None:
        super().__init__(trainer.accelerator, *args)
        self.trainer = trainer
        # Accelerate 1.15 steps the optimizer at the end of backward, within Trainer's `training_step`.
        trainer.hold_before(self.engine, "step")

    def forward(self, batch: Batch) -> Tensor:
        return self.trainer.forward(batch) if torch.is_grad_enabled() else super().forward(batch)

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        self.trainer.backward(loss)

    def step(self, lr: float) -> float:
        set_rates(self.engine.optimizer, lr)
        norm = self.trainer.step()
        overflowed = getattr(self.engine.optimizer, "overflow", False)
        return float("inf") if overflowed else norm

    def close(self) -> None:
        self.trainer.close()
        super().close()

    def _details(self, zero: Any) -> dict[str, Any]:
        return super()._details(zero) | details_of(self.trainer)


def details_of(trainer: HeldTrainer) -> dict[str, Any]:
    """What Trainer is given instead of its own, read from the live one."""
    return {
        "scheduler": type(trainer.lr_scheduler).__name__,
        "distributed_type": str(trainer.accelerator.distributed_type.value),
    }
