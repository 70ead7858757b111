"""What a planted fault does: runs in the ranks, where they note which phase they enter."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.injection import PLAN_VARIABLE, Injection, marker, read_plan

FOREVER = 3600.0
PLANTED = "planted by the test"
FILLER = "filler"
MEBIBYTE = 2**20


def plant(module: Any) -> None:
    """Have `PositionWriter` of this module let the faults happen that its run is to have."""
    writer = module.PositionWriter
    initialise, enter = writer.__init__, writer.enter

    def initialising(self: Any, run_directory: Path, rank: int) -> None:
        self.faults = _Faults(run_directory, rank)
        initialise(self, run_directory, rank)

    def entering(self: Any, phase: str) -> None:
        enter(self, phase)
        self.faults.entered(phase, self.position.step)

    writer.__init__, writer.enter = initialising, entering


class _Faults:
    """Those of one rank of one run."""

    def __init__(self, run_directory: Path, rank: int) -> None:
        request = json.loads((run_directory / "request.json").read_text())
        self._plan = Path(os.environ[PLAN_VARIABLE])
        self._run_directory = run_directory
        self._rank = rank
        own = (request["backend"], request["repeat"])
        self._waiting = [i for i in read_plan(self._plan) if (i.backend, i.repeat) == own]

    def entered(self, phase: str, step: int | None) -> None:
        """Let happen what is planted here."""
        for injection in [i for i in self._waiting if phase.partition(",")[0] == i.phase]:
            if injection.step in (None, step):
                self._waiting.remove(injection)
                self._happen(injection, phase, step)

    def _happen(self, injection: Injection, phase: str, step: int | None) -> None:
        if injection.rank != self._rank:
            if injection.kind == "other-collective":
                _all_reduce()
            return
        note = marker(self._plan, injection)
        if note.exists():
            return
        document = {"run_id": self._run_directory.name, "phase": phase, "step": step, "at": time.time()}
        note.write_text(json.dumps(document))
        ACTIONS[injection.kind](self._run_directory)


def _raise(_: Path) -> None:
    raise RuntimeError(PLANTED)


def _ask_for_host_memory(_: Path) -> None:
    import torch

    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 64 * MEBIBYTE,) * 2)
    torch.ones(2**30)


def _ask_for_device_memory(_: Path) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _spoil_losses(factor: float) -> Callable[[Path], None]:
    def spoil(_: Path) -> None:
        from torch.nn import functional

        sound = functional.cross_entropy
        functional.cross_entropy = lambda *given, **named: sound(*given, **named) * factor

    return spoil


def _lose_transformers(_: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        sys.modules[name] = None  # type: ignore[assignment]


def _leave(code: int) -> Callable[[Path], None]:
    return lambda _: os._exit(code)


def _signal_self(number: signal.Signals) -> Callable[[Path], None]:
    def act(_: Path) -> None:
        os.kill(os.getpid(), number)
        time.sleep(FOREVER)

    return act


def _signal_launcher(number: signal.Signals) -> Callable[[Path], None]:
    def act(_: Path) -> None:
        launcher = multiprocessing.parent_process()
        assert launcher.pid is not None
        os.kill(launcher.pid, number)

    return act


def _all_reduce(_: Path | None = None) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3))


def _all_gather(_: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5))


def _fill_disk(run_directory: Path) -> None:
    with (run_directory.parent / FILLER).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def _make_read_only(run_directory: Path) -> None:
    run_directory.chmod(0o555)


def _take_link_down(_: Path) -> None:
    subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)


ACTIONS: dict[str, Callable[[Path], None]] = {
    "raise": _raise,
    "host-memory": _ask_for_host_memory,
    "device-memory": _ask_for_device_memory,
    "nan-loss": _spoil_losses(float("nan")),
    "infinite-loss": _spoil_losses(float("inf")),
    "no-library": _lose_transformers,
    "exit-0": _leave(0),
    "exit-5": _leave(5),
    "terminated": _signal_self(signal.SIGTERM),
    "killed": _signal_self(signal.SIGKILL),
    "sleep": lambda _: time.sleep(FOREVER),
    "stopped": _signal_self(signal.SIGSTOP),
    "extra-collective": _all_reduce,
    "other-collective": _all_gather,
    "full-disk": _fill_disk,
    "read-only": _make_read_only,
    "network": _take_link_down,
    "ctrl-c": _signal_launcher(signal.SIGINT),
    "launcher-terminated": _signal_launcher(signal.SIGTERM),
    "launcher-killed": _signal_launcher(signal.SIGKILL),
}
"""What a rank does at a fault; told the folder of its run."""
