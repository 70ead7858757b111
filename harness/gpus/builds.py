"""Which GPUs torch's published CUDA wheels have kernels for, where the wheel cannot be asked."""

from __future__ import annotations

from harness.gpus.architectures import sm_name
from harness.gpus.wheel import Wheel

INDEX = "https://download.pytorch.org/whl"
BUILDS = {"12.6": ((5, 0), (9, 0)), "12.8": ((7, 5), (12, 1)), "13": ((7, 5), (12, 1))}
"""CUDA of a wheel -> the oldest and the newest capability. Source: torch's RELEASE.md, support matrix of 2.11
and later; 12.9 and later minors of 13 as the last one before them."""


def unfit_wheel(wheel: Wheel, capability: tuple[int, int]) -> str | None:
    """Why a wheel has no kernels for a GPU, and which one has; None: it has, or is not in the table."""
    if (advice := wheel_for(capability)) is None:
        return f"no wheel of torch has kernels for {sm_name(capability)}"
    if wheel.vendor != "NVIDIA":
        return f"{wheel} is not built for CUDA; {advice}" if wheel.is_known else None
    build = next((cuda for cuda in BUILDS if f"{wheel.cuda}.".startswith(f"{cuda}.")), None)
    if build is None or build in _fitting(capability):
        return None
    return f"{wheel} has no kernels for {sm_name(capability)}; {advice}"


def wheel_for(capability: tuple[int, int]) -> str | None:
    """What to install for a GPU; None: no wheel has kernels for it."""
    fitting = _fitting(capability)
    return f"install torch's wheel for CUDA {fitting[-1]} ({index_of(fitting[-1])})" if fitting else None


def _fitting(capability: tuple[int, int]) -> list[str]:
    return [cuda for cuda, (oldest, newest) in BUILDS.items() if oldest <= capability <= newest]


def index_of(cuda: str) -> str:
    """Where pip finds the wheel: '.../whl/cu126'."""
    return f"{INDEX}/cu{(cuda if '.' in cuda else cuda + '.0').replace('.', '')}"
