"""Builds a model without its weights: parameters on the meta device, buffers with their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Register = Callable[[nn.Module, str, nn.Parameter | None], None]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built here have parameters without memory; what is tied stays tied."""

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        plain(module, name, None if parameter is None else on_meta(parameter))

    with registering(register) as plain:
        yield


@contextmanager
def registering(register: Register) -> Iterator[Register]:
    """Have modules register their parameters through a function; yields torch's own."""
    plain = nn.Module.register_parameter
    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield plain  # type: ignore[misc]
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself if it is there already."""
    if parameter.is_meta:
        return parameter
    shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(shape, requires_grad=parameter.requires_grad)
