"""What DeepSpeed (0.19) does with data of other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

COMPARE = "assert_ints_same_as_other_ranks"
COMPARING = ("partition_parameters", "partitioned_param_coordinator", "stage3")
"""Modules of `deepspeed.runtime.zero` that compare what ranks recorded, in steps before the counted one."""


@contextmanager
def without_comparing_ranks() -> Iterator[None]:
    """Ranks that are not there recorded the same order of modules and parameters."""
    with ExitStack() as stack:
        for name in COMPARING:
            module = import_module(f"deepspeed.runtime.zero.{name}")
            stack.enter_context(patch.object(module, COMPARE, _agree))
        yield


def _agree(ints: Any) -> None:
    """All ranks have these numbers."""
