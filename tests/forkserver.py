"""The one fork server of a test process.

Whoever starts it first decides what every rank inherits, so it is given all that any test's ranks import:
without, each rank of DeepSpeed would import torch's compiler again, more than half of its time. Python 3.11
looks for the tests' own modules in the current directory only: elsewhere ranks import those themselves.
"""

from __future__ import annotations

import multiprocessing
from functools import cache
from multiprocessing.context import BaseContext

from harness.config import load_experiment
from harness.launch.cell import modules_to_preload
from harness.launch.local import LocalLauncher

NEEDED_BY_TESTS = (
    "tests.contract.communication", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bloom.modeling_bloom", "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
)  # fmt: skip


@cache
def launcher() -> LocalLauncher:
    """Starts the server."""
    experiment = load_experiment(None, [])
    return LocalLauncher(
        "cpu", [*modules_to_preload(experiment, ["zero1", "accelerate-ddp", "fsdp"]), *NEEDED_BY_TESTS]
    )


def context() -> BaseContext:
    """Processes of it are forked from the server."""
    launcher()
    return multiprocessing.get_context("forkserver")
