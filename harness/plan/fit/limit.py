"""How much memory a rank may use: bytes, a GPU's name, or what the devices of this machine have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError
from harness.gpus.found import find_gpus
from harness.job.experiment import read_bytes
from harness.plan.devices.hardware import load_hardware
from harness.record.provenance import host_memory_bytes
from harness.tell.formats import gigabytes


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a rank's allocator may serve."""

    limit_bytes: int
    origin: str
    """What was typed, or what was asked."""
    imposed: bool
    """Whether runs must be told to stay below it; a device does so by itself."""


def typed_limit(text: str, hardware: Path | None = None) -> Limit:
    """The limit that a person typed: bytes, or a GPU, of which an allocator can serve all but the context.

    Raises HarnessError.
    """
    if text.strip()[:1].isdigit() or text.strip().startswith("-"):
        try:
            return Limit(limit_bytes=read_bytes(text), origin=text, imposed=True)
        except ValueError as error:
            raise HarnessError(f"--limit was given '{text}': {error}") from error
    try:
        device = load_hardware(hardware).device(text)
    except HarnessError as error:
        raise HarnessError(f"--limit takes bytes such as 2GB, or a GPU: {error}") from error
    return Limit(limit_bytes=device.usable_bytes, origin=device.name, imposed=True)


def require_host_memory(limit: Limit, world_size: int, host_bytes: int) -> None:
    """Raise HarnessError if the ranks of a CPU run together could outgrow the machine."""
    if limit.limit_bytes * world_size > host_bytes:
        together = gigabytes(limit.limit_bytes * world_size)
        raise HarnessError(
            f"--limit {limit.origin} on {world_size} ranks is {together} GB, but this machine has "
            f"{gigabytes(host_bytes)} GB; lower --limit or --nproc, or plan for GPUs that are not here with "
            "`harness estimate --gpu NAME`"
        )


def find_limit(
    given: str | None, configured: int | None, device: str, world_size: int, hardware: Path | None = None
) -> Limit:
    """The limit of each rank: as typed, else as configured, else what the GPUs of this machine have.

    hardware: a file with GPUs of the user.

    Raises HarnessError where there is none, or the ranks together could outgrow the machine.
    """
    if given is not None:
        limit = typed_limit(given, hardware)
    elif configured is not None:
        limit = Limit(limit_bytes=configured, origin="runtime.memory_limit", imposed=True)
    elif device == "cuda":
        return _device_limit()
    else:
        raise HarnessError(
            "ranks on the CPU share the memory of the machine; give each a limit, such as --limit 2GB"
        )
    if device == "cpu":
        require_host_memory(limit, world_size, host_memory_bytes())
    return limit


def _device_limit() -> Limit:
    """The smallest memory of this machine's GPUs."""
    gpus = find_gpus()
    if gpus.smallest_bytes is not None:
        return Limit(limit_bytes=gpus.smallest_bytes, origin="memory of the GPU", imposed=False)
    raise HarnessError(f"no GPU can be used: {gpus.why_none}; give the memory of a rank with --limit")
