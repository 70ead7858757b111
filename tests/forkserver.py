"""The one fork server of a test process, and a port for its ranks.

Whoever starts it first decides what every rank inherits, so it is given all that any test's ranks import:
without, each rank of DeepSpeed would import torch's compiler again, more than half of its time. Python 3.11
looks for the tests' own modules in the current directory only: elsewhere ranks import those themselves.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from harness.job.config import load_experiment
from harness.launch.launcher import LocalLauncher, modules_to_preload

NEEDED_BY_TESTS = (
    "harness.rank.models.peft_preload", "tests.contract.deeds",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bloom.modeling_bloom", "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.resnet.modeling_resnet",
    "transformers.models.t5.modeling_t5", "transformers.models.vit.modeling_vit",
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


@contextmanager
def held_port() -> Iterator[int]:
    """A port that is given to nobody else meanwhile; a server that asks for SO_REUSEADDR can listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def run_ranks(
    target: Callable[..., None],
    world_size: int,
    arguments: Callable[[int], tuple],
    folder: Path,
    seconds: float,
) -> None:
    """Call `target(*arguments(rank))` in a process per rank; all must end with 0 within `seconds`.

    What ranks leave in `folder` as *.error is shown where one does not.
    """
    server: Any = context()
    ranks = [server.Process(target=target, args=arguments(rank)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.error")))
    codes = [process.exitcode for process in ranks]
    assert codes == [0] * world_size, f"exit codes {codes}\n{logs}"
