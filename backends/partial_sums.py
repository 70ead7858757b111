"""Sums added up from rounded parts, as tensor parallelism adds them, in the reference's one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.backends.tensor_parallel import require_plan
from harness.backends.tensor_plan import cut_dimension


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
