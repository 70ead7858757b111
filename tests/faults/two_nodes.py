"""Runs of torchrun on two nodes, whose link goes down while they train. A node is a network namespace."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.injection import Injection, write_plan
from tests.faults.namespaces import left_by_processes, leftovers
from tests.faults.scene import COMMAND_SECONDS, SETTINGS, Ended, Seen, seen, variables

ADDRESSES = ("10.83.0.1", "10.83.0.2")
PORT = 29555
RUN_SETTINGS = tuple(setting for setting in SETTINGS if not setting.startswith("compare."))


@dataclass
class TwoNodes:
    """A folder with one run over two nodes that share it."""

    folder: Path
    injection: Injection

    def play(self) -> list[Seen]:
        """Run it with its fault."""
        runs, temporary = self.folder / "runs", self.folder / "tmp"
        for path in (runs, temporary):
            path.mkdir(parents=True)
        plan = self.folder / "plan.json"
        write_plan(plan, [replace(self.injection, repeat=0)])
        with second_node() as enter:
            calls = self._run(enter, variables(plan, temporary))
        return [seen(self.injection, plan, runs, calls, None, leftovers(runs, temporary))]

    def _run(self, enter: list[str], environment: dict[str, str]) -> list[Ended]:
        processes = [
            subprocess.Popen(
                [*([] if node == 0 else enter), *self._command(node)], cwd=self.folder,
                env=environment | {"GLOO_SOCKET_IFNAME": f"node{node}"}, stdout=subprocess.DEVNULL,
                stderr=(self.folder / f"node{node}.log").open("w"),
            )
            for node in range(2)
        ]  # fmt: skip
        deadline = time.monotonic() + COMMAND_SECONDS
        codes: list[int | None] = []
        for process in processes:
            try:
                codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        left = [line for line in left_by_processes() if "sleep" not in line]
        return [Ended(code=code, errors="", left=left) for code in codes]

    def _command(self, node: int) -> list[str]:
        settings = [word for setting in RUN_SETTINGS for word in ("--set", setting)]
        return [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--node-rank", str(node), "--master-addr", ADDRESSES[0], "--master-port", str(PORT),
            "-m", "harness", "run", "--backend", self.injection.backend, "--runs", "runs", *settings,
        ]  # fmt: skip


@contextmanager
def second_node() -> Iterator[list[str]]:
    """A node next to this one; the words in front of a command that runs on it."""
    keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        while os.readlink(f"/proc/{keeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        enter = ["nsenter", f"--net=/proc/{keeper.pid}/ns/net"]
        _ip([], "link", "add", "node0", "type", "veth", "peer", "name", "node1", "netns", str(keeper.pid))
        for node, words in ((0, []), (1, enter)):
            _ip(words, "addr", "add", f"{ADDRESSES[node]}/24", "dev", f"node{node}")
            _ip(words, "link", "set", "lo", "up")
            _ip(words, "link", "set", f"node{node}", "up")
        yield enter
    finally:
        keeper.kill()
        keeper.wait()
        # Its end of the link goes away some time later, and this end with it.
        subprocess.run(["ip", "link", "del", "node0"], check=False, stderr=subprocess.DEVNULL)


def _ip(enter: list[str], *words: str) -> None:
    subprocess.run([*enter, "ip", *words], check=True)
