"""A script for a process of its own: writes what torch says of the GPUs here, as one JSON document.

It counts what CUDA's runtime can use. `nvidia-smi` would count GPUs that are hidden, divided or too new for
the driver or this build of torch.
"""

import ctypes
import json
import sys
from typing import Any


def answer() -> dict[str, Any]:
    """What torch and the driver say. Nothing is raised: an error is part of the answer."""
    try:
        import torch
    except Exception as error:
        return {"error": f"torch cannot be imported: {type(error).__name__}: {error}"}
    said: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver_cuda": driver_cuda(),
        "xpu_devices": torch.xpu.device_count() if hasattr(torch, "xpu") else 0,
        "mps": torch.backends.mps.is_available(),
    }
    if torch.version.cuda is None and torch.version.hip is None:
        return said
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        said["architectures"] = torch.cuda.get_arch_list()
        said["devices"] = [device(torch.cuda.get_device_properties(index)) for index in range(count)]
    except Exception as error:
        said["error"] = str(error)
    return said


def device(properties: Any) -> dict[str, Any]:
    """One GPU."""
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "memory_bytes": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "amd_architecture": amd_architecture(properties),
    }


def amd_architecture(properties: Any) -> str:
    """'gfx90a'; builds for CUDA repeat the device's name there."""
    import torch

    return properties.gcnArchName.partition(":")[0] if torch.version.hip else ""


def driver_cuda() -> int | None:
    """The newest CUDA that the driver takes, 12040 for 12.4; None: there is no driver to load."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        return (version.value or None) if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(answer()) + "\n")
