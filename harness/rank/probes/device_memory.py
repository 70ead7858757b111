"""Memory of this rank: what torch's allocator serves, its peak, and live tensors by kind.

On CUDA the caching allocator counts. On the CPU a counting allocator is compiled once and installed
before the model is built; without a C++ compiler allocated and peak bytes are None.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness.backends.base import TensorKind
from harness.errors import HarnessError

READING_INTERVAL_SECONDS = 0.001
"""Between two readings of what is served."""
EQUAL_READINGS = 5
"""After so many equal readings in a row, other threads have freed what they held."""
MOST_READINGS = 100


class AllocatorProbe:
    """Reads bytes that torch's allocator serves now, and at most since the last reset.

    This one counts nothing: every figure is None, and every live tensor stands among its kind.
    """

    def allocated_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int | None:
        return None

    def reset_peak(self) -> None:
        return None

    def limit(self, limit_bytes: int) -> None:
        """Refuse allocations above this many bytes with torch's out-of-memory error, as a full device does.

        Of a device it is the memory in use as the driver counts it: context and NCCL's buffers are part of
        it, as far as they exist when this is called. Raises HarnessError where that cannot be done.
        """
        raise HarnessError(
            f"runtime.memory_limit is {limit_bytes} bytes, but nothing counts allocations here: "
            "install a C++ compiler (g++), or leave the limit out"
        )

    @property
    def at_work(self) -> bool:
        """Whether the probe makes allocations noticeably slower now."""
        return False

    def wait_until_stable(self) -> None:
        """Wait until other threads have freed what they no longer need."""

    def serves(self, storage: torch.UntypedStorage) -> bool:
        """Whether the bytes of this storage are among those that are counted."""
        return True

    def identity(self, storage: torch.UntypedStorage) -> int:
        """A number that no other live storage has."""
        return storage.data_ptr()

    def relax(self) -> None:
        """Count from here on in passing, so that the timed steps do not pay for it: sizes are rounded up."""

    def reserved_peak_bytes(self) -> int | None:
        """Most bytes reserved from the device so far; None where the allocator reserves nothing."""
        return None

    def allocation_retries(self) -> int | None:
        """How often the allocator freed its cache and tried again so far; None where it keeps no cache."""
        return None


class CudaAllocatorProbe(AllocatorProbe):
    """torch.cuda's own statistics of the current device."""

    def __init__(self) -> None:
        self._reserved_peak = 0

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        # The reserved peak would be reset with it.
        self._reserved_peak = self.reserved_peak_bytes()
        torch.cuda.reset_peak_memory_stats()

    def serves(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "cuda"

    def reserved_peak_bytes(self) -> int:
        return max(self._reserved_peak, torch.cuda.max_memory_reserved())

    def held_bytes(self) -> dict[str, int]:
        """Of `record.MemoryPart`: blocks that are not free to be served, and what is held of the device.

        active: served, or freed while another stream may still use them (`Tensor.record_stream`).
        """
        statistics = torch.cuda.memory_stats()
        return {
            "active_bytes": int(statistics["active_bytes.all.current"]),
            "active_peak_bytes": int(statistics["active_bytes.all.peak"]),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        }

    def device_bytes(self) -> tuple[int, int]:
        """Free and total memory of the device, whoever uses it."""
        free, total = torch.cuda.mem_get_info()
        return free, total

    def allocation_retries(self) -> int:
        return int(torch.cuda.memory_stats()["num_alloc_retries"])

    def limit(self, limit_bytes: int) -> None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if limit_bytes > total:
            raise HarnessError(
                f"runtime.memory_limit is {limit_bytes} bytes, but the device has {total}; "
                "lower it or leave it out"
            )
        free, whole = self.device_bytes()
        outside = max(0, whole - free - torch.cuda.memory_reserved())
        torch.cuda.set_per_process_memory_fraction(max(0, limit_bytes - outside) / total)


class CpuAllocatorProbe(AllocatorProbe):
    """The counting allocator of counting_allocator.cpp, loaded into this process."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("allocated", "peak"):
            getattr(self._library, f"harness_{name}_bytes").restype = ctypes.c_longlong
        self._library.harness_serves.argtypes = [ctypes.c_void_p]
        self._library.harness_set_limit.argtypes = [ctypes.c_longlong]
        self._library.harness_install_allocator()
        self._installed = True

    @property
    def at_work(self) -> bool:
        return self._installed

    def allocated_bytes(self) -> int:
        return int(self._library.harness_allocated_bytes())

    def peak_bytes(self) -> int:
        return int(self._library.harness_peak_bytes())

    def reset_peak(self) -> None:
        self._library.harness_reset_peak()

    def limit(self, limit_bytes: int) -> None:
        self._library.harness_set_limit(limit_bytes)

    def wait_until_stable(self) -> None:
        # gloo's threads wake whoever waits for a collective before they let go of its buffers.
        held, equal = self.allocated_bytes(), 0
        for _ in range(MOST_READINGS):
            time.sleep(READING_INTERVAL_SECONDS)
            still = self.allocated_bytes()
            held, equal = still, equal + 1 if still == held else 0
            if equal == EQUAL_READINGS:
                break

    def serves(self, storage: torch.UntypedStorage) -> bool:
        return bool(self._library.harness_serves(storage.data_ptr()))

    def relax(self) -> None:
        # What the counting allocator served still carries its own deleter.
        if self._installed:
            self._library.harness_count_in_passing()
            self._installed = False


def allocator_probe(device: str) -> AllocatorProbe:
    """The probe for a device; install it before the first tensor that is to be counted."""
    if device == "cuda":
        return CudaAllocatorProbe()
    library = counting_allocator()
    return CpuAllocatorProbe(library) if library else AllocatorProbe()


def counting_allocator() -> Path | None:
    """Compile the counting allocator, or find it compiled for this torch; None without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    source = Path(__file__).with_name("counting_allocator.cpp")
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sharding-harness"
    library = cache / f"counting_allocator-{key}.so"
    if library.exists():
        return library
    if compiler is None:
        return None
    torch_root = Path(torch.__file__).parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, "-O2", "-fPIC", "-shared", "-std=c++20", f"-I{torch_root}/include"]
            abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
            command += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", str(source), "-o", str(built)]
            command += [f"-L{torch_root}/lib", "-lc10"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            built.replace(library)  # atomic, so that ranks may race
    except (OSError, subprocess.SubprocessError):
        return None
    return library


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """Live bytes by kind; None: the backend names no tensors."""

    inside: dict[str, int] | None
    """What the allocator serves."""
    outside: dict[str, int] | None
    """What it does not: on the host of a CUDA device, mapped from a file, allocated before."""

    def with_inside(self, further: Mapping[TensorKind, int]) -> LiveBytes:
        """The same with further bytes by kind that the allocator serves."""
        if self.inside is None:
            return self
        kinds = dict(self.inside)
        for kind, size in further.items():
            kinds[kind] = kinds.get(kind, 0) + size
        return LiveBytes(inside=kinds, outside=self.outside)


def live_bytes_by_kind(tensors: Iterable[tuple[str, Tensor]], allocator: AllocatorProbe) -> LiveBytes:
    """Sum the storages of (kind, tensor), each storage once under its first kind."""
    seen: set[int] = set()
    inside: dict[str, int] = {}
    outside: dict[str, int] = {}
    for kind, tensor in tensors:
        for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            storage = part.untyped_storage()
            size = storage.nbytes()
            if size and allocator.identity(storage) not in seen:
                seen.add(allocator.identity(storage))
                kinds = inside if allocator.serves(storage) else outside
                kinds[kind] = kinds.get(kind, 0) + size
    return LiveBytes(inside=inside if seen else None, outside=outside or None)


def host_peak_bytes() -> int:
    """Largest resident set of this process so far (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
