"""Loaded by `import torch` on the machine of the CUDA stub: its operators then run on the CPU."""

import ctypes
import os
from pathlib import Path

import torch


def load() -> None:
    """Replace the operators; there are no attention kernels, so that SDPA is composed of plain ones."""
    library = ctypes.CDLL(str(Path(__file__).parents[1] / "liboperators.so"))
    library.cuda_stub_replace_operators()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if "CUDA_STUB_FORKS" in os.environ:
        # Torch refuses CUDA in children of a process that has counted devices, since a driver does not
        # survive a fork. The stub does.
        torch._C._cuda_getDeviceCount = _device_count


def _device_count() -> int:
    count = ctypes.c_int()
    ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(count))
    return count.value
