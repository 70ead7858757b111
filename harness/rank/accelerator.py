"""The machine of a rank: driver and libraries of its GPU, TF32, matrix products, and where it may run."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from harness.backends.model.precision import dtype_name
from harness.gpus.ask_torch import driver_cuda
from harness.record import AcceleratorPart, PlacementPart

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
AMD_DRIVER = Path("/sys/module/amdgpu/version")
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


def describe_accelerator(device: str) -> AcceleratorPart | None:
    """Accelerator of this rank, once its device is in use; None on the CPU."""
    if device != "cuda":
        return None
    newest = driver_cuda()
    # As `torch.get_float32_matmul_precision` names it, also where a program used both interfaces.
    low = "medium" if fp32_precision("mkldnn.matmul") == "bf16" else "high"
    nccl = None
    with suppress(AttributeError, RuntimeError):  # a build without it
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return AcceleratorPart(
        driver=driver_release(),
        driver_cuda=f"{newest // 1000}.{newest % 1000 // 10}" if newest else None,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        nccl=nccl,
        cudnn=_cudnn_version(torch.backends.cudnn.version()),
        float32_matmul=low if fp32_precision("cuda.matmul") == "tf32" else "highest",
        cudnn_tf32="tf32" in (fp32_precision("cudnn.conv"), fp32_precision("cudnn.rnn")),
    )


def uses_tf32() -> bool:
    """Whether matrix products may use TF32: as torch is told, unless the variable of NVIDIA forbids it.

    Source: cuBLAS documentation, NVIDIA_TF32_OVERRIDE=0 goes before what a program chose.
    """
    return fp32_precision("cuda.matmul") == "tf32" and os.environ.get(TF32_OVERRIDE) != "0"


def fp32_precision(operator: str) -> str:
    """'ieee', 'tf32' or 'bf16': what torch computes fp32 tensors of this operator in.

    operator: 'cuda.matmul', 'cudnn.conv', 'cudnn.rnn' or 'mkldnn.matmul'. The kernels ask `fp32_precision`
    (torch 2.9 and newer), whichever interface a program set; `allow_tf32` and
    `get_float32_matmul_precision` raise, or tell an old value, once a program has used the newer one.
    """
    library, _, function = operator.partition(".")
    try:
        precision = getattr(getattr(torch.backends, library), function).fp32_precision
    except AttributeError:  # torch 2.8 and older
        if library == "mkldnn":
            return {"high": "tf32", "medium": "bf16"}.get(torch.get_float32_matmul_precision(), "ieee")
        of: Any = torch.backends.cuda.matmul if library == "cuda" else torch.backends.cudnn
        return "tf32" if of.allow_tf32 else "ieee"
    return "ieee" if precision == "none" else str(precision)


def driver_release(nvidia: Path = NVIDIA_DRIVER, amd: Path = AMD_DRIVER) -> str | None:
    """Release of the kernel's driver; None: the kernel has none, or does not say."""
    with suppress(OSError):
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", nvidia.read_text())
        if match is not None:
            return match[1]
    with suppress(OSError):
        return amd.read_text().strip() or None
    return None


def _cudnn_version(number: int | None) -> str | None:
    """'9.20.0' of 92000, '8.9.7' of 8907; MIOpen counts as the latter, '3.5.0' of 3005000."""
    if number is None:
        return None
    if torch.version.hip:
        return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"
    major = 10_000 if number >= 90_000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


SIZES = {"cpu": (256, 512, 1024), "cuda": (4096, 8192)}
"""Square products; the best of all sizes counts, since the largest need not be the fastest."""
REPEATS = 5
LEAST_SECONDS = 0.05
"""A repeat multiplies for at least so long, so that clocks and launches do not matter."""


def matmul_flops_per_second(device: str, dtype: torch.dtype) -> float:
    """Most floating-point operations per second of square matrix products, 2 n^3 each."""
    return max(_best(device, dtype, size) for size in SIZES[device])


def measured_peaks(device: str, dtype: torch.dtype) -> dict[str, float]:
    """The peak by dtype, in the form of `record.RankPart.matmul_flops_per_second`.

    Call it before anything of the job lies on the device: what it used is given back, and peaks begin anew.
    """
    peak = matmul_flops_per_second(device, dtype)
    if device == "cuda":  # else the matrices' memory would count as reserved by the training
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    tf32 = device == "cuda" and dtype is torch.float32 and uses_tf32()
    return {"tf32" if tf32 else dtype_name(dtype): peak}


def _best(device: str, dtype: torch.dtype, size: int) -> float:
    generator = torch.Generator(device).manual_seed(0)  # the job's own random numbers stay as they are
    left = torch.randn(size, size, device=device, generator=generator).to(dtype)
    right = torch.randn(size, size, device=device, generator=generator).to(dtype)
    out = torch.empty_like(left)
    count = 1
    while (seconds := _seconds(device, left, right, out, count)) < LEAST_SECONDS:
        count = max(count + 1, int(count * min(10.0, 1.5 * LEAST_SECONDS / max(seconds, 1e-9))))
    best = min(_seconds(device, left, right, out, count) for _ in range(REPEATS))
    return 2 * size**3 * count / best


def _seconds(device: str, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, count: int) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        torch.matmul(left, right, out=out)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")


def placement(device: str) -> PlacementPart | None:
    """Placement of this process; None where the system does not tell (not Linux)."""
    processors = status_value("Cpus_allowed_list")
    return None if processors is None else placed(processors, _address() if device == "cuda" else None)


def placed(
    processors: str, pci_address: str | None, nodes: Path = NODES, devices: Path = PCI_DEVICES
) -> PlacementPart:
    """processors: '0-3,8', those that the process may use. pci_address: '0000:3b:00.0', of its GPU."""
    own = read_list(processors)
    of_nodes = {
        int(folder.name[len("node") :]): read_list(_text(folder / "cpulist"))
        for folder in sorted(nodes.glob("node[0-9]*"))
    }
    gpu_node = _text(devices / pci_address / "numa_node") if pci_address else ""
    known = gpu_node.isdecimal()  # -1: the firmware does not say
    return PlacementPart(
        processors=processors,
        processor_count=len(own),
        numa_nodes=sorted(node for node, theirs in of_nodes.items() if own & theirs),
        device_numa_node=int(gpu_node) if known else None,
    )


def read_list(text: str) -> set[int]:
    """The numbers of '0-3,8', as the kernel writes sets of processors."""
    pieces = (piece.partition("-") for piece in text.split(",") if piece)
    return {number for first, _, last in pieces for number in range(int(first), int(last or first) + 1)}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _address() -> str | None:
    """PCI address of the current device; None before torch 2.6, which does not tell it."""
    own: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    if not hasattr(own, "pci_bus_id"):
        return None
    return f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0"


STATUS = Path("/proc/self/status")


def status_value(name: str) -> str | None:
    """The first word that the kernel says of this process under a name; None where it does not tell."""
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), None)
