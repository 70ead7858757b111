"""How much memory the ranks of a node may use: of this machine, as it is now."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from harness.errors import HarnessError
from harness.gpus.found import find_gpus
from harness.plan.hardware import Device, load_hardware

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 2**60
"""Version 1 of control groups writes a number above this where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Memory of a node and its devices."""

    device_bytes: int | None = None
    """Of each rank's device; None: not known, or the ranks compute on the CPU."""
    device: Device | None = None
    """What is known of the device besides."""
    host_bytes: int | None = None
    """Of a node, for all of its ranks together; None: not known."""
    imposed_bytes: int | None = None
    """What `runtime.memory_limit` lets torch's allocator serve each rank."""


def limits_here(torch_device: str, imposed_bytes: int | None = None) -> MemoryLimits:
    """Of this machine: its smallest GPU, and what the host has left."""
    host = available_host_bytes()
    if torch_device != "cuda":
        return MemoryLimits(host_bytes=host, imposed_bytes=imposed_bytes)
    gpus = find_gpus()
    device: Device | None = None
    names = {gpu.name for gpu in gpus.devices}
    if len(names) == 1:
        with suppress(HarnessError):  # a GPU that no table knows
            device = load_hardware().device(names.pop())
    return MemoryLimits(
        device_bytes=gpus.smallest_bytes, device=device, host_bytes=host, imposed_bytes=imposed_bytes
    )


def available_host_bytes() -> int:
    """Memory that new processes can take: what the machine has left, or less in a control group."""
    left = int(psutil.virtual_memory().available)
    in_group = control_group_headroom()
    return left if in_group is None else min(left, in_group)


def control_group_headroom(root: Path = CONTROL_GROUPS, membership: Path = OWN_GROUPS) -> int | None:
    """What containers and batch systems leave this process, caches of files not counted; None: no limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None  # not Linux
    found: list[int] = []
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers == "":
            names, top = ("memory.max", "memory.current"), root
        elif "memory" in controllers.split(","):
            names, top = ("memory.limit_in_bytes", "memory.usage_in_bytes"), root / "memory"
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top) and (left := _headroom(folder, *names)) is not None:
                found.append(left)
    return min(found, default=None)


def _headroom(folder: Path, limit_name: str, used_name: str) -> int | None:
    try:
        limit, used = (folder / limit_name).read_text().strip(), (folder / used_name).read_text()
        if limit == "max" or int(limit) >= UNLIMITED_BYTES:
            return None
        cached = 0
        with suppress(OSError):
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(statistics.get("inactive_file", statistics.get("total_inactive_file", 0)))
        return max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError):
        return None  # the group of another mount, or without a limit of its own


Answer = Literal["fits", "close", "does not fit"]
TIGHT_SHARE = 0.9
"""Of a device's memory: above it fragmentation and the error of a prediction may decide."""
BARELY_SHARE = 0.98
"""Of a device's memory: above it the next allocation of another size may fail."""
STATES_SHARE = 0.7
"""Of a device's memory: model states that leave room for activations that are not predicted."""


VERDICT_LEGEND = (
    f"fits: {1 - TIGHT_SHARE:.0%} of the memory or more is left; close: {1 - BARELY_SHARE:.0%} or more; "
    "barely: less"
).replace("%", " %")
"""What `MemoryVerdict.word` means."""


@dataclass(frozen=True, kw_only=True)
class MemoryVerdict:
    """What a rank needs of its device, beside what the device has."""

    needed_bytes: int
    """As nvidia-smi would show it: the allocator's peak, context and NCCL's buffers."""
    device_bytes: int

    @property
    def margin_bytes(self) -> int:
        """Negative: so much is missing."""
        return self.device_bytes - self.needed_bytes

    @property
    def answer(self) -> Answer:
        if self.margin_bytes < 0:
            return "does not fit"
        return "close" if self.needed_bytes > TIGHT_SHARE * self.device_bytes else "fits"

    @property
    def fits(self) -> bool:
        """Whether it fits at all, if only tightly."""
        return self.margin_bytes >= 0

    @property
    def leaves_room(self) -> bool:
        """Whether it fits with enough left for fragmentation and the error of a prediction."""
        return self.answer == "fits"

    @property
    def barely_fits(self) -> bool:
        """Whether it fits with so little left that it is no recommendation."""
        return self.fits and self.needed_bytes > BARELY_SHARE * self.device_bytes

    @property
    def said(self) -> str:
        """The answer for people."""
        return "barely fits" if self.barely_fits else self.answer

    @property
    def word(self) -> str:
        """The same for a table: 'fits', 'close', 'barely' or 'no'."""
        return {"does not fit": "no", "barely fits": "barely"}.get(self.said, self.said)
