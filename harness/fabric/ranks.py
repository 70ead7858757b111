"""Starts the ranks of a self-test of the network on this machine, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from harness.errors import HarnessError
from harness.fabric.result import FABRIC_NAME, FabricResult, read_fabric
from harness.files import scratch_folder
from harness.import_path import module_command, safe_environment
from harness.launch.ending import die_with
from harness.launch.launcher import require_libraries


def start_ranks(nproc: int, arguments: Sequence[str]) -> FabricResult:
    """Run `harness fabric` with these arguments under torchrun on this machine."""
    require_libraries("ranks", ("torch",))
    with scratch_folder("fabric") as scratch:
        answer = Path(scratch) / FABRIC_NAME
        command = [
            *module_command("torch.distributed.run"), "--standalone", f"--nproc-per-node={nproc}", "-m",
            "harness", "fabric", *arguments, "--output", str(answer),
        ]  # fmt: skip
        variables = safe_environment()
        variables.setdefault("OMP_NUM_THREADS", "1")
        if sys.platform == "linux":
            variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        code, output = _run(command, variables)
        if not answer.exists():
            message = next((x for x in reversed(output.splitlines()) if "Error" in x), "")
            raise HarnessError(f"the ranks of the self-test failed with exit code {code}: {message}")
        return read_fabric(answer)


def _run(command: Sequence[str], variables: dict[str, str]) -> tuple[int, str]:
    """Exit code of torchrun and its standard error; leaves no rank behind, however this ends."""
    # torchrun ends its ranks on SIGTERM, which the kernel sends if this process is killed.
    follow_parent = partial(die_with, os.getpid(), signal.SIGTERM) if sys.platform == "linux" else None
    torchrun = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=follow_parent,
    )
    try:
        _, output = torchrun.communicate()
    finally:
        _end_family(torchrun)
    return torchrun.returncode, output


def _end_family(torchrun: subprocess.Popen[str]) -> None:
    """End torchrun and its ranks, each of which has a session of its own."""
    if torchrun.poll() is not None:
        return
    torchrun.send_signal(signal.SIGSTOP)  # it starts no other
    ranks = psutil.Process(torchrun.pid).children(recursive=True)
    torchrun.kill()
    torchrun.wait()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.kill()
