"""What DeepSpeed imports and tries out late: half a second of each rank's start, done once instead.

A fork server imports this module before it forks ranks that will use DeepSpeed.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from inspect import isfunction
from typing import Any
from unittest.mock import patch

import deepspeed
import deepspeed.ops
import torch

LATE = (
    "deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_utils",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)  # fmt: skip
"""As 0.19 names them; earlier versions lack some."""


def at_first_call(function: Any = None, **settings: Any) -> Any:
    """What `torch.compile` would return of a function, made when it is called.

    Torch's compiler takes half a second to import.
    """
    if not isfunction(function):
        return COMPILE(function, **settings)
    compiled: Callable[[], Any] = cache(lambda: COMPILE(function, **settings))

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return compiled()(*arguments, **named)

    return call


COMPILE = torch.compile
with patch.object(torch, "compile", at_first_call):  # Muon's functions, which few jobs call
    for name in LATE:
        with suppress(ModuleNotFoundError):
            import_module(name)

compatible_ops = deepspeed.ops.__compatible_ops__
"""Found out on first access, by compiling a C program."""
