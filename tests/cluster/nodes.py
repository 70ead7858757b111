"""Nodes of a cluster on one machine: each has its own network, host name, processes and mounts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from harness.launch.ending import die_with

MANAGEMENT, DATA = "10.81.0", "10.82.0"  # exist inside the namespaces only
MTU_BYTES = 1500
INIT = (
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); open(sys.argv[1], 'w').close()\n"
    "while True: signal.pause()"
)


class Nodes:
    """A head and numbered nodes, joined by a management network (eth0) and a data network (hsn0).

    Every process of a node is a descendant of one that dies with this process, so nothing is left behind.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = list(names)
        self._init: dict[str, subprocess.Popen[bytes]] = {}
        self.hosts = folder / "hosts"
        lines = ["127.0.0.1 localhost", f"{MANAGEMENT}.1 head"]
        lines += [f"{MANAGEMENT}.{11 + i} {name}" for i, name in enumerate(self.names)]
        self.hosts.write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        self._boot("head")
        for bridge, network in (("br0", MANAGEMENT), ("br1", DATA)):
            self._ip("head", "link", "add", bridge, "type", "bridge")
            self._ip("head", "addr", "add", f"{network}.1/24", "dev", bridge)
            self._ip("head", "link", "set", bridge, "up")
        for name in self.names:
            self.power_on(name)

    def stop(self) -> None:
        for name in list(self._init):
            self.power_off(name)

    def power_on(self, name: str) -> None:
        self._boot(name)
        address = 11 + self.names.index(name)
        for bridge, device, network in (("br0", "eth0", MANAGEMENT), ("br1", "hsn0", DATA)):
            peer = ("peer", "name", device, "netns", str(self._init[name].pid))
            self._ip("head", "link", "add", f"{device}-{name}", "type", "veth", *peer)
            self._ip("head", "link", "set", f"{device}-{name}", "mtu", str(MTU_BYTES), "master", bridge, "up")
            # The same hardware address after each boot, else the others ask for seconds after the old one.
            hardware = f"02:00:00:00:{int(network.split('.')[1]):02x}:{address:02x}"
            self._ip(name, "link", "set", device, "address", hardware)
            self._ip(name, "addr", "add", f"{network}.{address}/24", "dev", device)
            self._ip(name, "link", "set", device, "up")

    def power_off(self, name: str) -> None:
        """Every process of the node is gone at once, and its links too: a pulled plug."""
        process = self._init.pop(name)
        process.kill()  # --kill-child: the node's first process dies, and with it all others
        process.wait(20)

    def powered_off(self) -> list[str]:
        return [name for name in self.names if name not in self._init]

    def shape(self, rate: str | None) -> None:
        """Cap what each node sends on the data network, such as '200mbit'; None lifts the cap."""
        for name in set(self.names) & set(self._init):
            self._tc(name, "del", check=False)
            if rate is not None:
                self._tc(name, "add", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")

    def enter(self, name: str, *, network_only: bool = False) -> list[str]:
        """Words in front of a command that runs it on a node; with a working directory as first word."""
        namespaces = f"/proc/{self._init[name].pid}/ns"
        if network_only:
            return ["nsenter", f"--net={namespaces}/net"]
        kinds = [f"--{kind}={namespaces}/{file}" for kind, file in _KINDS]
        return ["nsenter", *kinds, "--", "sh", "-c", 'cd "$0" && exec "$@"']

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        words = [*self.enter(name), "/", *command]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    def sent_bytes(self, device: str = "hsn0") -> dict[str, int]:
        """Bytes that each node has sent once: what TCP sent again is taken off."""
        found = {}
        for name in self.names:
            text = self.run(name, "cat", "/proc/net/dev", "/proc/net/snmp").stdout
            line = next(line for line in text.splitlines() if line.strip().startswith(f"{device}:"))
            names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
            again = int(values[names.index("RetransSegs")]) * (MTU_BYTES - 52)
            found[name] = int(line.split(":")[1].split()[8]) - again
        return found

    def _boot(self, name: str) -> None:
        flag = self.folder / f"{name}.up"
        flag.unlink(missing_ok=True)
        script = f"""
            set -e
            mount -t proc proc /proc
            mount --bind '{self.hosts}' /etc/hosts
            mount -t tmpfs -o mode=755 tmpfs /run
            mkdir /run/munge
            mount -t tmpfs -o mode=1777 tmpfs /dev/shm
            mount -t sysfs sysfs /sys 2>/dev/null || true
            hostname {name}
            echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null || true
            ip link set lo up
            exec "$0" -c "$1" "$2"
        """
        kinds = ["--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child"]
        with (self.folder / f"{name}.out").open("wb") as log:
            self._init[name] = subprocess.Popen(
                ["unshare", *kinds, "--", "sh", "-c", script, sys.executable, INIT, str(flag)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                preexec_fn=partial(die_with, os.getpid(), signal.SIGKILL),
            )  # fmt: skip
        wait_for(flag.exists, f"node {name}: see {self.folder}/{name}.out")

    def _ip(self, name: str, *arguments: str) -> None:
        subprocess.run([*self.enter(name, network_only=True), "ip", *arguments], check=True)

    def _tc(self, name: str, action: str, *arguments: str, check: bool = True) -> None:
        command = ["tc", "qdisc", action, "dev", "hsn0", "root", *arguments]
        words = [*self.enter(name, network_only=True), *command]
        subprocess.run(words, check=check, capture_output=not check)


_KINDS = (("mount", "mnt"), ("pid", "pid_for_children"), ("net", "net"), ("uts", "uts"), ("ipc", "ipc"))


def wait_for(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Poll until the condition holds. Raises TimeoutError that says for what it waited."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.2)
