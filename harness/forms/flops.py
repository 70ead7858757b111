"""Operations of a decoder, peak rates of devices from their data sheets, and what 1e9 tokens take."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from harness.forms.model.activations import recomputed_share


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """What the closed forms need of a model."""

    multiplying_parameters: int
    block_parameters: int
    """Those of the transformer blocks, which recomputation runs again."""
    layers: int
    attention_width: int
    """Heads times head size, H Q."""
    sequence_length: int
    frozen_parameters: int = 0
    """Of the multiplying ones, those below adapters: gradients go through them, and they have none."""


def attention_flops_per_token(geometry: ModelGeometry) -> int:
    """12 L H Q T: scores and weighted values, forward and backward."""
    return 12 * geometry.layers * geometry.attention_width * geometry.sequence_length


def model_flops_per_token(geometry: ModelGeometry) -> int:
    """6 N + 12 L H Q T: a weight multiplies in the forward pass, for its input's gradient and for its own.

    A frozen one has no gradient of its own: 4 of it instead of 6. With adapters of A elements on a frozen
    base of N these are 4 N + 6 A + 12 L H Q T.
    """
    products = 6 * geometry.multiplying_parameters - 2 * geometry.frozen_parameters
    return products + attention_flops_per_token(geometry)


def hardware_flops_per_token(geometry: ModelGeometry, *, recomputation: bool | str) -> int:
    """Model FLOPs, and 2 N + 4 L H Q T once more of the blocks that recompute.

    recomputation: as `training.activation_checkpointing` has it.
    """
    again = 2 * geometry.block_parameters + attention_flops_per_token(geometry) // 3
    return model_flops_per_token(geometry) + int(again * recomputed_share(recomputation, geometry.layers))


def least_flops_per_token(geometry: ModelGeometry) -> int:
    """6 N + 6 L H Q T: what even a kernel that skips the masked half of attention must do."""
    return model_flops_per_token(geometry) - attention_flops_per_token(geometry) // 2


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """One product, as torch.cuda names it."""

    words: tuple[str, ...]
    """The device's name contains all of them."""
    teraflops: Mapping[str, float]
    sheet: str


DEVICE_PEAKS = tuple(
    DevicePeak(words=tuple(device["words"]), teraflops=device["teraflops"], sheet=device["sheet"])
    for device in tomllib.loads(files(__package__).joinpath("device_peaks.toml").read_text("utf-8"))["device"]
)


STUB = "CUDA stub"
"""The name of devices without hardware begins so (`tests/gpu_stub/native/device.cpp`)."""


def is_stub(device_name: str) -> bool:
    """Whether a device only answers as one would, as in the project's tests."""
    return device_name.startswith(STUB)


@lru_cache
def find_peak(device_name: str, dtype: str) -> tuple[float, str] | None:
    """Peak in FLOP/s and the sheet it is from; None: the device or its rate for the dtype is unknown.

    device_name: as torch.cuda.get_device_name() says it.
    dtype: 'float32', 'tf32', 'bfloat16', 'float16', 'float8'.
    """
    words = device_name.replace("-", " ").replace("_", " ").upper().split()
    if "MIG" in words or is_stub(device_name):  # a slice of the device, or none
        return None
    for device in DEVICE_PEAKS:
        if all(word.upper() in words for word in device.words):
            in_half = device.teraflops.get("bfloat16") if dtype == "float16" else None
            rate = device.teraflops.get(dtype, in_half)
            return None if rate is None else (rate * 1e12, device.sheet)
    return None


BILLION = 1e9
SECONDS_PER_HOUR = 3600.0
JOULES_PER_KILOWATT_HOUR = 3.6e6


def gpu_hours(tokens_per_second: float, gpus: int) -> float:
    """Hours of one GPU for 1e9 tokens where `gpus` together train `tokens_per_second`."""
    return BILLION / tokens_per_second * gpus / SECONDS_PER_HOUR


def kilowatt_hours(tokens_per_second: float, watts: float) -> float:
    """Energy for 1e9 tokens at this power and rate."""
    return BILLION / tokens_per_second * watts / JOULES_PER_KILOWATT_HOUR
