"""When FSDP gathers weights ahead: settings from options, and what is in force read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, FullyShardedDataParallel

from harness.backends.base import BackendOptions
from harness.backends.options import Fsdp1Options, Fsdp2Options

_BACKWARD = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def fsdp1_prefetch_arguments(options: BackendOptions) -> dict[str, Any]:
    """Arguments of FullyShardedDataParallel that the options ask for."""
    if not isinstance(options, Fsdp1Options):
        return {}
    arguments: dict[str, Any] = {
        name: value
        for name in ("forward_prefetch", "limit_all_gathers")
        if (value := getattr(options, name)) is not None
    }
    if options.backward_prefetch is not None:
        arguments["backward_prefetch"] = _BACKWARD[options.backward_prefetch]
    return arguments


def describe_fsdp1_prefetch(fsdp: FullyShardedDataParallel) -> dict[str, Any]:
    """The settings of a wrapped model."""
    backward = fsdp.backward_prefetch
    return {
        "forward_prefetch": fsdp.forward_prefetch,
        "backward_prefetch": backward.name if backward else "none",
        "limit_all_gathers": fsdp.limit_all_gathers,
    }


def set_fsdp2_prefetch(model: nn.Module, blocks: Sequence[nn.Module], options: BackendOptions) -> None:
    """Let each unit gather the next `prefetch` blocks ahead: after it forward, before it backward."""
    count = options.prefetch if isinstance(options, Fsdp2Options) else None
    if count is None:
        return
    units = [_fsdp_module(block) for block in blocks]
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, index - count) : index][::-1])
    # The root's weights are used around the blocks: before the first and after the last.
    root = _fsdp_module(model)
    root.set_modules_to_forward_prefetch(units[:count])
    root.set_modules_to_backward_prefetch(units[-count:][::-1])


def describe_fsdp2_prefetch(blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """Blocks that are gathered ahead explicitly; 'implicit' where torch decides."""
    states = [_fsdp_module(block)._get_fsdp_state() for block in blocks]
    ahead = max((len(state._states_to_forward_prefetch) for state in states), default=0)
    behind = max((len(state._states_to_backward_prefetch) for state in states), default=0)
    return {"forward_prefetch": ahead or "implicit", "backward_prefetch": behind or "implicit"}


def _fsdp_module(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
