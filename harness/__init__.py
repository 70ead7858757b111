"""Runs one fine-tuning job under every data-parallel sharding strategy and compares what happened.

`import harness` loads nothing heavy: each name is imported on first use.
"""

from harness.import_path import is_program_of_ours, leave_current_folder

if is_program_of_ours():  # before anything else is imported, `__future__` included
    leave_current_folder()

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.version import __version__

if TYPE_CHECKING:
    from harness.api import Estimate, Results, compare, estimate, load, run
    from harness.errors import HarnessError

__all__ = ["Estimate", "HarnessError", "Results", "__version__", "compare", "estimate", "load", "run"]

_HOMES = {
    "Estimate": "harness.api",
    "HarnessError": "harness.errors",
    "Results": "harness.api",
    "compare": "harness.api",
    "estimate": "harness.api",
    "load": "harness.api",
    "run": "harness.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'harness' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
