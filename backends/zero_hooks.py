"""Lets ZeRO-3 attach its gradient hooks without gathering the parameters for it. DeepSpeed 0.19."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def hooked_without_gather(model: nn.Module) -> Iterator[None]:
    """Around `deepspeed.initialize` of a model whose parameters are partitioned.

    `create_reduce_and_remove_grad_hooks` (stage3.py) gathers each parameter, attaches a hook, and frees it. A
    hook needs no values, so each parameter shows its shape without memory instead: a rank never holds a whole
    embedding, and gloo's copy of it, for that. Its own `all_gather` is back when this ends.
    """
    parameters: list[Any] = list(model.parameters())
    gathers = [parameter.all_gather for parameter in parameters]
    for parameter, gather in zip(parameters, gathers, strict=True):
        parameter.all_gather = partial(_show_shape, parameter, gather)
    try:
        yield
    finally:
        for parameter, gather in zip(parameters, gathers, strict=True):
            parameter.all_gather = gather


def _show_shape(parameter: Any, gather: Any, several: Sequence[Any] | None = None, **how: Any) -> Any:
    """Look gathered, with one value for all elements; several parameters are gathered as always."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if several is not None:
        return gather(several, **how)
    parameter.data = parameter.data.new_zeros(1).expand(parameter.ds_shape)
    parameter.ds_status = ZeroParamStatus.AVAILABLE
    return None
