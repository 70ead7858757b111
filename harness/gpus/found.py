"""Counts the GPUs that ranks on this machine can use; says why there are none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.gpus.architectures import runs_on, sm_name
from harness.gpus.builds import wheel_for
from harness.gpus.signs import Sign, signs_of_gpus
from harness.gpus.visible import SELECTORS, fault_of_selection, hiding
from harness.gpus.wheel import Wheel, installed_wheel
from harness.import_path import safe_environment

QUESTION = Path(__file__).with_name("ask_torch.py")
PATIENCE_SECONDS = 300.0
"""For an import of torch from a slow network file system."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device, as torch names it."""

    name: str
    uuid: str
    memory_bytes: int
    """All of it, as torch reports it."""
    capability: tuple[int, int]
    amd_architecture: str = ""
    """'gfx90a'; empty for NVIDIA's."""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """What ranks on this machine can use."""

    devices: tuple[Gpu, ...] = ()
    wheel: Wheel | None = None
    """None: torch is not installed."""
    architectures: tuple[str, ...] = ()
    """That the installed torch has kernels for; empty where it was not asked."""
    driver_cuda: str | None = None
    """The newest CUDA that the driver takes, such as '12.4'."""
    why_none: str | None = None
    """In one line; None: there are GPUs."""
    refusal: str | None = None
    """Why no run may start that would take GPUs where there are some, in one line."""
    signs: tuple[Sign, ...] = field(default=())
    """What makes one expect GPUs."""

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def smallest_bytes(self) -> int | None:
        """Memory of the smallest device; None: there is none."""
        return min((gpu.memory_bytes for gpu in self.devices), default=None)

    @property
    def named(self) -> str:
        """'4 x NVIDIA H200', '1 x Tesla T4 and 1 x Tesla V100-SXM2-16GB'."""
        return " and ".join(
            f"{count} x {name}" for name, count in Counter(gpu.name for gpu in self.devices).items()
        )


def find_gpus() -> Gpus:
    """The GPUs that a new process of this interpreter and environment would have.

    Asks torch in a process of its own, 2 to 5 s, where there is a sign of a GPU and a build of torch that can
    drive it; once per command and environment.
    """
    return _find(tuple((name, os.environ.get(name)) for name in (*SELECTORS, "LD_LIBRARY_PATH", "PATH")))


@lru_cache
def _find(_environment: tuple[tuple[str, str | None], ...]) -> Gpus:
    return judge(installed_wheel(), signs_of_gpus(), os.environ)


def judge(wheel: Wheel | None, signs: Sequence[Sign], environment: Mapping[str, str]) -> Gpus:
    """What a machine with these signs has; asks torch if only it can know."""
    found = tuple(signs)
    if wheel is None:
        return Gpus(why_none="torch is not installed", signs=found)
    if (without := why_not_asked(wheel, found)) is not None:
        apple = any(sign.vendor == "Apple" for sign in found)
        return Gpus(wheel=wheel, why_none=without, refusal=_unsupported("an MPS device") if apple else None,
                    signs=found)  # fmt: skip
    if wheel.vendor != "Intel" and (hidden := hiding(environment, wheel.vendor)) is not None:
        return Gpus(wheel=wheel, why_none=f"{hidden} hides all GPUs", signs=found)
    return read_answer(_ask(), wheel, found, environment)


def why_not_asked(wheel: Wheel, signs: Sequence[Sign]) -> str | None:
    """Why torch has no GPU for sure; None: it must be asked."""
    if not wheel.is_known:
        return None if signs else "this machine shows no GPU"
    matching = [sign for sign in signs if sign.vendor == wheel.vendor]
    if matching or wheel.vendor == "Intel":
        return None
    if not signs:
        return "this machine shows no GPU"
    sign = signs[0]
    if sign.vendor == "Apple":
        return "the harness does not run on Apple's GPUs"
    build = "CUDA" if sign.vendor == "NVIDIA" else "ROCm"
    return (
        f"{wheel} is not built for {build}, although {sign} speaks for {sign.vendor} GPUs; install torch's "
        f"{build} wheel (https://pytorch.org/get-started/locally)"
    )


def read_answer(
    answer: Mapping[str, Any], wheel: Wheel, signs: tuple[Sign, ...], environment: Mapping[str, str]
) -> Gpus:
    """What torch's answer (`ask_torch`) means."""
    devices = tuple(
        Gpu(**(entry | {"capability": tuple(entry["capability"])})) for entry in answer.get("devices", ())
    )
    driver = _cuda_version(answer.get("driver_cuda") or _found_version(str(answer.get("error"))))
    architectures = tuple(answer.get("architectures", ()))
    refusal, why = None, None
    if answer.get("xpu_devices"):
        refusal = why = _unsupported(f"{answer['xpu_devices']} XPU devices")
    elif not devices:
        why = _why_none(str(answer.get("error") or ""), wheel, driver)
        if "driver" not in why:
            refusal = fault_of_selection(environment, 0, wheel.vendor)
    else:
        refusal = fault_of_selection(environment, len(devices), wheel.vendor)
        refusal = refusal or without_kernels(devices, architectures, wheel)
    return Gpus(
        devices=devices, wheel=wheel, architectures=architectures, driver_cuda=driver, why_none=why,
        refusal=refusal, signs=signs,
    )  # fmt: skip


def without_kernels(devices: Sequence[Gpu], architectures: Sequence[str], wheel: Wheel) -> str | None:
    """Why this torch cannot compute on these GPUs; None: it can on all of them."""
    for gpu in devices:
        if gpu.amd_architecture:
            own, runs = gpu.amd_architecture, gpu.amd_architecture in architectures
        else:
            own, runs = sm_name(gpu.capability), runs_on(gpu.capability, architectures)
        if architectures and not runs:
            return (
                f"{wheel} has no kernels for {gpu.name} ({own}), only for {', '.join(architectures)}; "
                f"{_wheel_for(gpu)}"
            )
    return None


def _wheel_for(gpu: Gpu) -> str:
    """What to install."""
    advice = None if gpu.amd_architecture else wheel_for(gpu.capability)
    return advice or "install a build of torch that has them (https://pytorch.org/get-started/locally)"


def _unsupported(what: str) -> str:
    return f"found {what}: the harness runs on CUDA and ROCm GPUs and on the CPU"


def _why_none(error: str, wheel: Wheel, driver: str | None) -> str:
    first = " ".join(error.split()).split(". ")[0].rstrip(".")
    if "too old" in error:
        return (
            f"the NVIDIA driver takes CUDA {driver or 'of an older version'} and {wheel} needs a newer one; "
            "update the driver, or install torch's wheel for the driver's CUDA"
        )
    if first in ("", "No CUDA GPUs are available"):
        return f"{wheel} finds no GPU here"
    # torch asks first whether CUDA was used too early, and names CUDA's own error last.
    of_cuda = re.search(r"Error \d+: .+", " ".join(error.split()))
    said = f"{first}: {of_cuda[0].rstrip('.')}" if of_cuda and of_cuda[0] not in first else first
    return f"{wheel} cannot use a GPU: {said}"


def _found_version(error: str) -> int | None:
    """The driver's version of CUDA that torch names where it is too old."""
    match = re.search(r"found version (\d+)", error)
    return int(match[1]) if match else None


def _cuda_version(number: int | None) -> str | None:
    """'12.4' of 12040."""
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _ask() -> dict[str, Any]:
    """torch's answer; without one, why."""
    command = [sys.executable, "-P", str(QUESTION)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, errors="replace",
            env=safe_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not say within {PATIENCE_SECONDS:.0f} s what GPUs there are"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        return {"error": f"torch ended with exit code {done.returncode} when asked for GPUs: {last}"}
    return answer
