"""Chooses the device of a run: GPUs where ranks can use them, else the CPU, and says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.errors import HarnessError
from harness.gpus.found import Gpus, find_gpus

ON_THE_CPU = "--set runtime.device=cpu"
"""How a command is told to run on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ChosenDevice:
    """What the ranks of a run compute on."""

    name: Literal["cpu", "cuda"]
    why: str
    """'2 x NVIDIA H200', 'this machine shows no GPU'."""
    is_surprising: bool = False
    """Whether something speaks for GPUs and the ranks are on the CPU nevertheless."""


def choose_device(asked: str, cpu_option: str = ON_THE_CPU) -> ChosenDevice:
    """The device for `runtime.device`: 'auto', 'cpu' or 'cuda'.

    cpu_option: how the command is told to run on the CPU. Raises HarnessError where GPUs were asked for and
    none can be used, and where there are some that cannot be used as they are.
    """
    if asked == "cpu":
        return ChosenDevice(name="cpu", why="asked for")
    gpus = find_gpus()
    if gpus.refusal is not None:
        raise HarnessError(f"{gpus.refusal}; {cpu_option} runs on the CPU")
    if gpus.why_none is not None and asked == "cuda":
        raise HarnessError(f"no GPU can be used: {gpus.why_none}; {cpu_option} runs on the CPU")
    return device_of(gpus)


def device_of(gpus: Gpus) -> ChosenDevice:
    """The device that ranks can compute on, whatever was asked for."""
    why_not = gpus.refusal or gpus.why_none
    if why_not is None:
        return ChosenDevice(name="cuda", why=gpus.named)
    return ChosenDevice(name="cpu", why=why_not, is_surprising=bool(gpus.signs))
