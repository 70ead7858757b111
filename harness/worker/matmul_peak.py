"""What a rank reaches in matrix products alone: the measured peak that utilisation can be put against."""

from __future__ import annotations

import time

import torch

from harness.backends.precision import dtype_name
from harness.worker.accelerator import uses_tf32

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
