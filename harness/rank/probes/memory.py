"""How memory is measured: what torch's allocator serves and its peak, live tensors by kind, and what the
process holds beyond that (resident set, driver, pinned and reserved bytes).

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
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from harness.backends.base import Engine
from harness.errors import HarnessError
from harness.files import user_cache
from harness.rank.accelerator import status_value
from harness.rank.live.model_watch import in_backward
from harness.rank.step_hooks import Step, StepHook
from harness.record import Moment

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

    def allocation_retries(self) -> int:
        return int(torch.cuda.memory_stats()["num_alloc_retries"])

    def limit(self, limit_bytes: int) -> None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if limit_bytes > total:
            raise HarnessError(
                f"runtime.memory_limit is {limit_bytes} bytes, but the device has {total}; "
                "lower it or leave it out"
            )
        free, whole = torch.cuda.mem_get_info()
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
    library = user_cache() / f"counting_allocator-{key}.so"
    if library.exists():
        return library
    if compiler is None:
        return None
    torch_root = Path(torch.__file__).parent
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
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


class LiveBytes(NamedTuple):
    """Live bytes by kind; None: the backend names no tensors."""

    inside: dict[str, int] | None
    """What the allocator serves."""
    outside: dict[str, int] | None
    """What it does not: on the host of a CUDA device, mapped from a file, allocated before."""


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


class DriverUse(NamedTuple):
    """Memory of a device in use as the driver counts it, contexts and NCCL's buffers included."""

    used_bytes: int | None = None
    of: Literal["process", "device"] | None = None
    """Whose memory it is: of this process, or of all programs on the device. None: not known."""
    unknown: str | None = None
    """Why the figure is not that of this process alone."""


def process_memory(allocator: AllocatorProbe) -> dict[str, Any]:
    """Fields of `record.MemoryPart`; device figures are left out without CUDA.

    active: blocks that are served, or freed while another stream may still use them (`Tensor.record_stream`).
    pinned: page-locked host memory in use by torch, rounded as torch allocates it; None before torch 2.7.
    """
    figures: dict[str, Any] = {"host_resident_bytes": psutil.Process().memory_info().rss}
    if isinstance(allocator, CudaAllocatorProbe):
        statistics, driver = torch.cuda.memory_stats(), device_use()
        of_host: dict[str, Any] = getattr(torch.cuda, "host_memory_stats", dict)()
        figures |= {
            "active_bytes": int(statistics["active_bytes.all.current"]),
            "active_peak_bytes": int(statistics["active_bytes.all.peak"]),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
            "num_alloc_retries": allocator.allocation_retries(),
            "device_used_bytes": driver.used_bytes,
            "device_used_of": driver.of,
            "device_used_unknown": driver.unknown,
            "pinned_bytes": of_host.get("active_bytes.current"),
        }
    return figures


def device_use() -> DriverUse:
    """What the driver says of this process, or of its device where it cannot tell processes apart.

    A rank has its device to itself, as `require_own_devices` checks, so that the device's figure is the
    rank's, unless a program that is not of this run uses the device too.
    """
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    own = driver_use(nvml(), uuid, os.getpid())
    if own.used_bytes is not None:
        return own
    free, total = torch.cuda.mem_get_info()
    return DriverUse(used_bytes=total - free, of="device", unknown=own.unknown)


def device_handle(library: Any, uuid: str) -> Any:
    """NVML's handle of the device, or of the MIG instance, that CUDA names by this UUID. Raises NVMLError."""
    try:
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except library.NVMLError:
        return library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def driver_use(library: Any, uuid: str, process_id: int) -> DriverUse:
    """Ask NVML what a process that computes on a device uses there.

    library: pynvml after `nvmlInit`, or a sentence why there is none. The driver numbers processes as the
    machine does; in a container with process ids of its own it names others, or none at all.
    """
    if isinstance(library, str):
        return DriverUse(unknown=library)
    try:
        handle = device_handle(library, uuid)
        processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
    except library.NVMLError as error:
        return DriverUse(unknown=f"NVML: {error}")
    own = [process for process in processes if process.pid == process_id]
    if not own:
        # This process computes on the device, so the driver knows it by another number.
        return DriverUse(
            unknown=f"the driver names {len(processes)} processes on this device, none with this process's "
            "id, as in a container with process ids of its own"
        )
    if own[0].usedGpuMemory is None:
        return DriverUse(unknown="the driver does not report the memory of a process on this device")
    return DriverUse(used_bytes=int(own[0].usedGpuMemory), of="process")


@cache
def nvml() -> Any:
    """The NVML library, ready to be asked, or a sentence why it cannot be had."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed (extra `nvml`)"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    return pynvml


INTERVAL_SECONDS = 0.005


def anonymous_bytes() -> int | None:
    """Resident memory that is not backed by a file; None where the system does not tell.

    Mapped pages of a file of weights are left out: they are the system's cache, once for all ranks.
    """
    kib = status_value("RssAnon")
    return None if kib is None else int(kib) * 1024


class HostPeak:
    """Samples `anonymous_bytes` from a thread; a peak shorter than the interval may be missed."""

    def __init__(self) -> None:
        self.before_bytes = anonymous_bytes()
        self.peak_bytes = self.before_bytes
        self.after_bytes: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> HostPeak:
        if self.before_bytes is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self.before_bytes is not None:
            self._thread.join()
            self.note()
        self.after_bytes = anonymous_bytes()

    def _sample(self) -> None:
        while not self._end.wait(INTERVAL_SECONDS):
            self.note()

    def note(self) -> None:
        """Take the memory of this moment into account."""
        self.peak_bytes = max(self.peak_bytes or 0, anonymous_bytes() or 0)


LONGEST_HISTORY = 200_000
"""Allocations and frees that torch remembers, oldest dropped first."""


class Snapshot:
    """Records every allocation with its stack between `start` and `write`; CUDA only."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._recording = False

    def start(self) -> None:
        if not self._recording:
            torch.cuda.memory._record_memory_history(max_entries=LONGEST_HISTORY)
            self._recording = True

    def write(self) -> None:
        """Write the file and stop recording; does nothing before `start`."""
        if self._recording:
            torch.cuda.memory._dump_snapshot(str(self.file))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False


class MemoryProbe:
    """Kinds are walked over the engine's tensors; the rest that the allocator serves is 'other'."""

    def __init__(
        self,
        allocator: AllocatorProbe,
        engine: Engine,
        others: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
    ) -> None:
        """others: tensors that are not the engine's, each with its kind."""
        self.allocator = allocator
        self.rows: list[dict[str, Any]] = []
        self._engine = engine
        self._others = others
        self._rest_before_forward: int | None = None
        self._gathered: list[int] = []
        self._hook: Any = None
        self._watching_seconds = 0.0

    def begin(self) -> None:
        """Start a probed step: peaks count from here."""
        self._hook = register_module_forward_hook(self._after_module)
        self.allocator.reset_peak()

    def end(self) -> float:
        """End a probed step, if one is going on; return the seconds spent on watching its modules."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        spent, self._watching_seconds = self._watching_seconds, 0.0
        return spent

    def before_forward(self) -> None:
        """Remember what is there before a forward pass, so that its activations can be identified."""
        self.allocator.wait_until_stable()
        live = self._live()
        self._rest_before_forward = _rest(self.allocator.allocated_bytes(), live)

    def record(self, step: int, moment: Moment) -> None:
        """Add a row for this moment and count peaks from here."""
        peak = self.allocator.peak_bytes()
        self.allocator.wait_until_stable()
        live = self._live()
        allocated = self.allocator.allocated_bytes()
        rest = _rest(allocated, live)
        kinds = None if live.inside is None else dict(live.inside)
        if kinds is not None and rest is not None:
            if moment == "after_forward" and self._rest_before_forward is not None:
                kinds["activations"] = rest - self._rest_before_forward
                rest = self._rest_before_forward
            kinds["other"] = rest
        self.rows.append(
            {
                "step": step,
                "moment": moment,
                "allocated_bytes": allocated,
                "peak_bytes": peak,
                "kinds": kinds,
                "outside_kinds": live.outside,
                "gathered_peak_bytes": max(self._gathered, default=None),
                "gathered_least_bytes": min(self._gathered, default=None),
                **process_memory(self.allocator),
            }
        )
        self._rest_before_forward = None
        self._gathered = []
        self.allocator.reset_peak()

    @contextmanager
    def span(self, step: int, moment: Moment) -> Iterator[None]:
        """Record what happens in between as one moment: its peak, and what lives at its end."""
        self.begin()
        try:
            yield
        finally:
            self.end()
        self.record(step, moment)

    def _live(self) -> LiveBytes:
        engine = self._engine.state_tensors()
        first = next(engine, None)
        if first is None:  # a backend that names no tensors: its kinds are unknown, not zero
            return LiveBytes(inside=None, outside=None)
        live = live_bytes_by_kind(chain([first], engine, self._others()), self.allocator)
        if live.inside is not None:
            for kind, size in self._engine.hidden_bytes().items():
                live.inside[kind] = live.inside.get(kind, 0) + size
        return live

    def _after_module(self, module: nn.Module, *_: Any) -> None:
        """Weights are gathered while a module computes; its library's own hooks run after this one.

        Not in a backward pass that recomputes: libraries then gather ahead in both directions.
        """
        if torch.compiler.is_compiling():
            return  # of what a graph calls nothing stands between gathering and use
        if not module._parameters or in_backward():
            return
        begin = time.perf_counter()
        gathered = (("gathered", tensor) for tensor in self._engine.gathered_tensors())
        live = live_bytes_by_kind(gathered, self.allocator).inside or {}
        self._gathered.append(live.get("gathered", 0))
        self._watching_seconds += time.perf_counter() - begin


def _rest(allocated: int | None, live: LiveBytes) -> int | None:
    """What the allocator has served beyond the live tensors."""
    return None if allocated is None or live.inside is None else allocated - sum(live.inside.values())


class StepMemory(StepHook):
    """What is allocated at the end of each step that is not probed, and its peak.

    Outside of the observer, whose batches are gone when this is read.
    """

    def __init__(self, allocator: AllocatorProbe) -> None:
        self._allocator = allocator
        self._reads = False

    def prepare(self, step: Step) -> None:
        self._reads = step.window != "probed"

    def begin(self) -> None:
        if self._reads:
            self._allocator.reset_peak()

    def facts(self) -> dict[str, Any]:
        if not self._reads:
            return {}
        return {
            "allocated_bytes": self._allocator.allocated_bytes(),
            "peak_bytes": self._allocator.peak_bytes(),
        }
