"""`transformers.Trainer` held at the points where it takes a batch, has a loss, and has gradients.

Only what Trainer documents as its extension points is overridden. Its loop, its preparation by Accelerate,
`training_step`, clipping and the steps of optimizer and scheduler are its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from ..base import BackendOptions, BuildOptimizer, SetupContext
from ..model.precision import scaler_arguments
from ..options import reduces_each
from .handover import GivenRates, Handover

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
            self._pin_scaler()

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

    def _pin_scaler(self) -> None:
        """TrainingArguments has no settings of the loss scaler."""
        constants = scaler_arguments(self._context.loss_scale)
        scaler = self.accelerator.scaler
        scaler.load_state_dict(scaler.state_dict() | constants | {"scale": constants["init_scale"]})


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
