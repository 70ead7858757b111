"""A network namespace of one's own, in which the loopback interface carries the bytes of one job only."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from select import select
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
HEADER_BYTES = 66
"""Of every TCP packet over IPv4 on the loopback interface: Ethernet 14, IP 20, TCP 20 and its time stamp
option 12. The kernel counts them, and acknowledgements without data, which are nothing else."""


@dataclass(frozen=True)
class Traffic:
    """What the loopback interface received since it came up; on it that is what was sent."""

    bytes: int
    packets: int
    retransmissions: int
    """TCP segments that were sent again."""

    @property
    def payload_bytes(self) -> int:
        """Without the header of each packet."""
        return self.bytes - HEADER_BYTES * self.packets

    def __sub__(self, other: Self) -> Self:
        return type(self)(
            self.bytes - other.bytes,
            self.packets - other.packets,
            self.retransmissions - other.retransmissions,
        )


def traffic() -> Traffic:
    """Read the kernel's counters of `lo` in this process's namespace."""
    interfaces = dict(
        line.strip().split(":", 1)
        for line in Path("/proc/self/net/dev").read_text().splitlines()
        if ":" in line
    )
    received = interfaces["lo"].split()
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return Traffic(
        int(received[0]), int(received[1]), int(dict(zip(names, values, strict=True))["RetransSegs"])
    )


def payload_of_calls(call: Callable[[], object], times: int) -> list[int]:
    """Bytes on `lo` in each of `times` calls that every rank of the default group makes.

    Read between barriers. A call in which some segment was sent twice is made again, up to ten times as many.
    """
    import torch
    import torch.distributed as dist

    clean: list[int] = []
    for _ in range(10 * times):
        dist.barrier()
        before = traffic()
        dist.barrier()
        call()
        dist.barrier()
        moved = traffic() - before
        dist.barrier()
        if not moved.retransmissions:
            clean.append(moved.payload_bytes)
        # Ranks may read the counters apart; the first one's word goes for all.
        enough = torch.tensor(len(clean) >= times)
        dist.broadcast(enough, 0)
        if enough:
            break
    return clean


@cache
def why_not() -> str | None:
    """Why no namespace can be had here; None if one can."""
    try:
        done = subprocess.run(
            _in_namespace([sys.executable, "-c", "pass"]), capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


class Namespace:
    """A process in a fresh network namespace whose loopback interface is up; it starts one fork server."""

    def __init__(self) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            _in_namespace([sys.executable, "-m", "tests.wire.namespace"]), env=environment, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def answer(self, function: str, *arguments: object, seconds: float = 300) -> Any:
        """What a function of `measured.py` returns there; fails with its traceback if it raises."""
        questions, answers = self._process.stdin, self._process.stdout
        assert answers is not None
        questions.write(json.dumps([function, *arguments]) + "\n")
        questions.flush()
        assert select([answers], [], [], seconds)[0], f"{function} gave no answer in {seconds} s"
        answer = json.loads(answers.readline() or '{"error": "the process ended"}')
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def close(self) -> None:
        """End the process; its fork server and ranks end with it."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def _in_namespace(command: Sequence[str]) -> list[str]:
    return ["unshare", "-rn", sys.executable, "-m", "tests.wire.loopback", *command]


def answer(question: str) -> dict[str, object]:
    """Call what one line names: `Namespace.answer` on the other side."""
    name, *arguments = json.loads(question)
    try:
        return {"value": getattr(import_module("tests.wire.measured"), name)(*arguments)}
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    # Whatever else prints must not come between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(answer(line)), file=answers, flush=True)
