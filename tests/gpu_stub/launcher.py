"""Starts ranks on devices of the stub from a server that has imported the libraries."""

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from harness.job.config import load_experiment
from harness.launch.launcher import LocalLauncher, modules_to_preload
from harness.run_directory.request import RunRequest

FORKS = "CUDA_STUB_FORKS"
"""Whether devices are counted so that children may use them."""


class ForkingLauncher(LocalLauncher):
    """Forks the ranks of CUDA devices, which a driver forbids and the stub does not mind.

    The harness itself starts each as a new process, which imports for 15 s.
    """

    def __init__(self) -> None:
        self.device = "cuda"
        self._more: Mapping[str, str] = {}
        self._logs = False
        preload = modules_to_preload(load_experiment(None, []), ["zero1", "trainer-ddp", "fsdp"])
        os.environ[FORKS] = "1"
        os.environ["HARNESS_PRELOAD"] = ",".join([*preload, "transformers.trainer", "tests.gpu_stub.ranks"])
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["harness.rank.preload"])
        forkserver.ensure_running()  # a run ends whatever it started itself

    @contextmanager
    def environment(self, variables: Mapping[str, str], *, log: bool = False) -> Iterator[None]:
        """Variables of the ranks that are started meanwhile, and whether the stub logs in their run."""
        self._more, self._logs = variables, log
        try:
            yield
        finally:
            self._more, self._logs = {}, False

    def _start(self, run_directory: Path, request: RunRequest, rank: int, store: Any, turns: Any) -> Any:
        if self._logs:
            self._more = {**self._more, "CUDA_STUB_LOG": str(run_directory)}
        return super()._start(run_directory, request, rank, store, turns)

    def _variables(self, request: RunRequest, rank: int, port: int) -> dict[str, str]:
        return super()._variables(request, rank, port) | dict(self._more)


@cache
def launcher() -> ForkingLauncher:
    """The one of this process: it has one fork server."""
    return ForkingLauncher()
