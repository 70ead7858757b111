"""What driver and libraries the GPUs of a rank have, and how torch uses TF32 on them."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from harness.gpus.ask_torch import driver_cuda
from harness.record import AcceleratorPart

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
AMD_DRIVER = Path("/sys/module/amdgpu/version")
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


def describe_accelerator(device: str) -> AcceleratorPart | None:
    """Of this rank, once its device is in use; None on the CPU."""
    if device != "cuda":
        return None
    newest = driver_cuda()
    return AcceleratorPart(
        driver=driver_release(),
        driver_cuda=f"{newest // 1000}.{newest % 1000 // 10}" if newest else None,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        nccl=_nccl_version(),
        cudnn=_cudnn_version(torch.backends.cudnn.version()),
        float32_matmul=_float32_matmul(),
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
        return _fp32_precision_before_2_9(library)
    return "ieee" if precision == "none" else str(precision)


def _fp32_precision_before_2_9(library: str) -> str:
    match library:
        case "cuda":
            return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        case "cudnn":
            return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
        case _:
            return {"high": "tf32", "medium": "bf16"}.get(torch.get_float32_matmul_precision(), "ieee")


def driver_release(nvidia: Path = NVIDIA_DRIVER, amd: Path = AMD_DRIVER) -> str | None:
    """Release of the kernel's driver; None: the kernel has none, or does not say."""
    with suppress(OSError):
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", nvidia.read_text())
        if match is not None:
            return match[1]
    with suppress(OSError):
        return amd.read_text().strip() or None
    return None


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # a build without it
        return None


def _cudnn_version(number: int | None) -> str | None:
    """'9.20.0' of 92000, '8.9.7' of 8907; MIOpen counts as the latter, '3.5.0' of 3005000."""
    if number is None:
        return None
    if torch.version.hip:
        return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"
    major = 10_000 if number >= 90_000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def _float32_matmul() -> str:
    """As `torch.get_float32_matmul_precision` names it, also where a program used both interfaces."""
    if fp32_precision("cuda.matmul") != "tf32":
        return "highest"
    return "medium" if fp32_precision("mkldnn.matmul") == "bf16" else "high"
