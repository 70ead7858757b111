"""A complete backend: hand-written data parallelism with one all-reduce per gradient and step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.backends.base import (
    Backend,
    BackendOptions,
    Batch,
    BuildModel,
    BuildOptimizer,
    Effective,
    Engine,
    SetupContext,
    TensorKind,
    Unsupported,
)


class AllReduceOptions(BackendOptions):
    """`all-reduce:order=backward`."""

    order: Literal["forward", "backward"] = "forward"


class AllReduceBackend(Backend):
    """Makes the engine; refuses what it cannot do with the reason that the table shall show."""

    Options = AllReduceOptions
    claims = "ddp"  # another copy of the weights, or more traffic than DDP's, would be a finding

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        if context.precision != "fp32":
            raise Unsupported(f"all-reduce 1.0 knows fp32 only, not {context.precision}")
        model = build_model().to(context.world.device)
        optimizer = build_optimizer(model.named_parameters())
        assert isinstance(self.options, AllReduceOptions)
        return AllReduceEngine(model, optimizer, context, self.options.order)


class AllReduceEngine(Engine):
    """Every rank holds everything; gradients become their mean over ranks before the update."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, context: SetupContext, order: str
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._context = context
        self._order = order

    def forward(self, batch: Batch) -> Tensor:
        return self._context.compute_loss(self._model, batch)

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        loss.backward()
        if last_micro_step:
            parameters = list(self._model.parameters())
            for parameter in parameters if self._order == "forward" else reversed(parameters):
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(self._context.world.world_size)

    def step(self, lr: float) -> float:
        limit = self._context.gradient_clipping
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        # In fp64, or rounding of the norm would become a difference of the losses.
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
        if limit is not None and norm > limit:
            for gradient in gradients:
                gradient *= limit / norm
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach().cpu()

    def effective(self) -> Effective:
        dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        return Effective(
            strategy="all-reduce by hand",
            wrap_units=[""],
            parameter_dtype=dtype,
            autocast_dtype=None,
            master_dtype=dtype,
            gradient_dtype=dtype,
            reduce_dtype=dtype,
            optimizer=f"{type(self._optimizer).__module__}.{type(self._optimizer).__qualname__}",
            optimizer_groups=[
                {key: value for key, value in group.items() if key != "params"}
                for group in self._optimizer.param_groups
            ],
            gradient_clipping=self._context.gradient_clipping,
            accumulation_steps=self._context.accumulation_steps,
            gradient_synchronisation="last micro-step",
            loss_scale=None,
            offload=[],
            parameter_count=sum(parameter.numel() for parameter in self._model.parameters()),
        )

    def native_config(self) -> dict[str, Any]:
        return {"order": self._order}

    def save(self, directory: Path) -> None:
        if self._context.world.rank == 0:
            states = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save(states, directory / "all-reduce.pt")

    def load(self, directory: Path) -> None:
        states = torch.load(directory / "all-reduce.pt", map_location=self._context.world.device)
        self._model.load_state_dict(states["model"])
        self._optimizer.load_state_dict(states["optimizer"])

    # Without the three below the engine trains as well. `harness diagnose` then compares updates only, a job
    # with dropout or an evaluation computes as in training, and memory by kind is unknown.

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad.detach().cpu()

    def train(self, mode: bool = True) -> None:
        self._model.train(mode)

    def state_tensors(self) -> Iterator[tuple[TensorKind, Tensor]]:
        for parameter in self._model.parameters():
            yield "weights", parameter
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield "optimizer", value
        for buffer in self._model.buffers():
            yield "buffers", buffer
