"""One process that trains on the whole global batch: the reference that every strategy is judged by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .base import Backend, Batch, BuildModel, BuildOptimizer, Engine, SetupContext, TensorKind, World
from .ddp import ddp_strategy
from .model.blocks import first_trained, parameter_count
from .model.precision import compute_dtype, grad_scaler
from .options import SingleOptions
from .piece import OptimizerProgress
from .tensor.backend import require_plan
from .tensor.plan import cut_dimension
from .torch_engine import TorchEngine


class CastEngine(TorchEngine):
    """The masters are the module's parameters; a copy of the module in the compute dtype runs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._low = copy.deepcopy(self.module)
        dtype = compute_dtype(self.context.precision)
        for module in self._low.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # as FSDP1 runs it (_common_utils.py)
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
                module.register_forward_hook(lambda *given: given[-1].to(dtype))
            else:
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype)
        # A copy of a module is not compiled.
        for low, master in zip(self._low.modules(), self.module.modules(), strict=True):
            if getattr(master, "_compiled_call_impl", None) is not None:
                low.compile()

    def forward(self, batch: Batch) -> Tensor:
        return self.context.compute_loss(self._low, batch)

    def backward(self, loss: Tensor, *, last_micro_step: bool) -> None:
        self._run_backward(loss)
        for master, low in zip(self.module.parameters(), self._low.parameters(), strict=True):
            if low.grad is not None:
                gradient = low.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad + gradient
                low.grad = None

    def step(self, lr: float) -> float:
        norm = super().step(lr)
        self._refresh()
        return norm

    def load(self, directory: Path) -> None:
        super().load(directory)
        self._refresh()

    def continue_from(self, progress: OptimizerProgress) -> None:
        super().continue_from(progress)
        self._refresh()

    def _refresh(self) -> None:
        with torch.no_grad():
            for master, low in zip(self.module.parameters(), self._low.parameters(), strict=True):
                low.copy_(master)

    def state_tensors(self) -> Iterator[tuple[TensorKind, Tensor]]:
        yield from super().state_tensors()
        for parameter in self._low.parameters():
            yield "gathered", parameter.detach()
        for buffer in self._low.buffers():
            yield "buffers", buffer

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        self._low.train(mode)


def add_up_parts(model: nn.Module, parts: int) -> None:
    """Have each linear layer that `tensor_plan` cuts compute in `parts` pieces, whose results are added.

    A layer cut by rows adds up its output, one cut by columns the gradient of its input. Each piece is
    rounded to the compute dtype before it is added, and so is each sum: what ranks along 'tensor' do. In
    exact arithmetic nothing changes. Raises Unsupported where the plan does not fit the model.
    """
    require_plan(model, parts)
    compute: dict[int | None, Callable[[nn.Linear, int, Tensor], Tensor]] = {0: _by_columns, 1: _by_rows}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            cut = cut_dimension(f"{name}.weight", module.weight.shape, parts)
            if cut is not None:
                module.forward = partial(compute[cut], module, parts)  # type: ignore[method-assign]


def _by_columns(layer: nn.Linear, parts: int, inputs: Tensor) -> Tensor:
    biases = [None] * parts if layer.bias is None else layer.bias.chunk(parts)
    outputs = [
        functional.linear(inputs, weight, bias)
        for weight, bias in zip(layer.weight.chunk(parts), biases, strict=True)
    ]
    return torch.cat(outputs, dim=-1)


def _by_rows(layer: nn.Linear, parts: int, inputs: Tensor) -> Tensor:
    pieces = zip(inputs.chunk(parts, dim=-1), layer.weight.chunk(parts, dim=1), strict=True)
    first, *others = [functional.linear(piece, weight) for piece, weight in pieces]
    output = sum(others, start=first)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class _Identity(torch.autograd.Function):
    """A node of the graph that does nothing."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        # A copy: modules may change what they are given in place, which torch forbids for such a view.
        return tensor.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def reorder_backward(model: nn.Module) -> None:
    """Put a node of its own before every module's inputs, as ZeRO-3 does to release parameters.

    A tensor that several modules read (queries, keys and values; a residual and its branch) then adds up
    its gradients in the order in which these nodes were made: each sample's gradient is rounded otherwise.
    """
    for module in model.modules():
        module.register_forward_pre_hook(_through_nodes, with_kwargs=True)


def _through_nodes(
    _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_node, inputs)), {name: _node(value) for name, value in named.items()}


def _node(value: Any) -> Any:
    return _Identity.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


def in_double(compute_loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of a batch whose floating numbers are float64."""

    def compute(module: nn.Module, batch: Batch) -> Tensor:
        return compute_loss(
            module, {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
        )

    return compute


class SingleBackend(Backend):
    """No distribution at all."""

    Options = SingleOptions

    def unmet_requirements(self, world: World) -> list[str]:
        if world.world_size == 1:
            return []
        return [f"'single' is one process, this world has {world.world_size} ranks"]

    def prepare(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, context: SetupContext
    ) -> Engine:
        model = build_model()
        precision = getattr(self.options, "precision", None)
        if precision in ("fp32", "fp64"):
            context = replace(context, precision="fp32")
            model.double() if precision == "fp64" else model.float()
        if precision == "fp64":
            torch.set_default_dtype(torch.float64)
            context = replace(context, compute_loss=in_double(context.compute_loss))
        cast = precision == "cast" and context.precision.endswith("-mixed")
        if getattr(self.options, "backward", None) == "reordered":
            reorder_backward(model)
        if (parts := getattr(self.options, "partial_sums", None)) is not None:
            add_up_parts(model, parts)
        count = parameter_count(model)
        model.to(context.world.device)
        strategy = ddp_strategy(
            model,
            {},
            count,
            name="single process",
            reduce_dtype=None,
            compute_dtype=compute_dtype(context.precision) if cast else first_trained(model).dtype,
            autocast=not cast,
            fp32_norm=getattr(self.options, "norm", None) == "fp32",
        )
        engine_class = CastEngine if cast else TorchEngine
        optimizer = build_optimizer(model.named_parameters())
        return engine_class(model, optimizer, context, strategy, grad_scaler(context))
