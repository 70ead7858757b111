"""Operations of a decoder, peak rates of devices from their data sheets, and what 1e9 tokens take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from harness.forms.activations import recomputed_share


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


def attention_flops_per_token(geometry: ModelGeometry) -> int:
    """12 L H Q T: scores and weighted values, forward and backward."""
    return 12 * geometry.layers * geometry.attention_width * geometry.sequence_length


def model_flops_per_token(geometry: ModelGeometry) -> int:
    """6 N + 12 L H Q T."""
    return 6 * geometry.multiplying_parameters + attention_flops_per_token(geometry)


def hardware_flops_per_token(geometry: ModelGeometry, *, recomputation: bool | str) -> int:
    """Model FLOPs, and 2 N + 4 L H Q T once more of the blocks that recompute.

    recomputation: as `training.activation_checkpointing` has it.
    """
    again = 2 * geometry.block_parameters + attention_flops_per_token(geometry) // 3
    return model_flops_per_token(geometry) + int(again * recomputed_share(recomputation, geometry.layers))


def least_flops_per_token(geometry: ModelGeometry) -> int:
    """6 N + 6 L H Q T: what even a kernel that skips the masked half of attention must do."""
    return 6 * geometry.multiplying_parameters + attention_flops_per_token(geometry) // 2


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """One product, as torch.cuda names it."""

    words: tuple[str, ...]
    """The device's name contains all of them."""
    teraflops: Mapping[str, float]
    sheet: str


def _peak(
    *words: str, fp32: float, sheet: str, tf32: float = 0, bf16: float = 0, fp16: float = 0, fp8: float = 0
) -> DevicePeak:
    rates = {"float32": fp32, "tf32": tf32, "bfloat16": bf16, "float16": fp16 or bf16, "float8": fp8}
    return DevicePeak(words=words, teraflops={k: v for k, v in rates.items() if v}, sheet=sheet)


_H100 = "NVIDIA H100 Tensor Core GPU datasheet"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"

# The first whose words all occur counts: variants stand before the plain name.
DEVICE_PEAKS = (
    _peak("H200", "NVL", fp32=60, tf32=417.5, bf16=835.5, fp8=1670.5, sheet=_H200),
    _peak("H200", fp32=67, tf32=494.5, bf16=989.5, fp8=1979, sheet=_H200),
    _peak("GH200", fp32=67, tf32=494.5, bf16=989.5, fp8=1979, sheet="NVIDIA GH200 Superchip datasheet"),
    _peak("H100", "NVL", fp32=60, tf32=417.5, bf16=835.5, fp8=1670.5, sheet=_H100),
    _peak("H100", "PCIe", fp32=51, tf32=378, bf16=756.5, fp8=1513, sheet=_H100),
    _peak("H100", fp32=67, tf32=494.5, bf16=989.5, fp8=1979, sheet=_H100),
    _peak("H800", "PCIe", fp32=51, tf32=378, bf16=756.5, fp8=1513, sheet="NVIDIA H800 specification"),
    _peak("H800", fp32=67, tf32=494.5, bf16=989.5, fp8=1979, sheet="NVIDIA H800 specification"),
    # The sheets print the rates of 72 GPUs, and most with sparsity.
    _peak("GB300", fp32=80, tf32=1250, bf16=2500, fp8=5000, sheet="NVIDIA GB300 NVL72 datasheet, per GPU"),
    _peak("GB200", fp32=80, tf32=1250, bf16=2500, fp8=5000, sheet="NVIDIA GB200 NVL72 datasheet, per GPU"),
    # Hopper with 78 of the H100's 132 multiprocessors; NVIDIA publishes no sheet.
    _peak("H20", fp32=44, tf32=74, bf16=148, fp8=296, sheet="NVIDIA H20 specification of vendors"),
    _peak("B200", fp32=75, tf32=1125, bf16=2250, fp8=4500, sheet="NVIDIA DGX B200 datasheet, per GPU"),
    # CINECA's Leonardo: 124 multiprocessors where the A100 has 108 (arXiv 2307.16885), rates in proportion.
    _peak("A100", "64GB", fp32=22.4, tf32=179.1, bf16=358.2, sheet="custom A100 of Leonardo"),
    _peak("A100", fp32=19.5, tf32=156, bf16=312, sheet="NVIDIA A100 Tensor Core GPU datasheet"),
    _peak("A800", fp32=19.5, tf32=156, bf16=312, sheet="NVIDIA A800 specification"),
    _peak("A5000", fp32=27.8, tf32=55.6, bf16=111.1, sheet="NVIDIA RTX A5000 datasheet"),
    _peak("6000", "ADA", fp32=91.1, tf32=182.1, bf16=364.2, fp8=728.5, sheet="NVIDIA RTX 6000 Ada"),
    _peak("A6000", fp32=38.7, tf32=77.4, bf16=154.8, sheet="NVIDIA RTX A6000 datasheet"),
    # GeForce: products with fp32 accumulation, which training uses, at half the rate of those without.
    _peak("4090", fp32=82.6, tf32=82.6, bf16=165.2, fp8=330.3, sheet="NVIDIA Ada architecture whitepaper"),
    _peak("3090", fp32=35.6, tf32=35.6, bf16=71, sheet="NVIDIA Ampere GA102 GPU architecture whitepaper"),
    _peak("A10G", fp32=35, tf32=35, bf16=70, sheet="NVIDIA A10G specification (AWS g5)"),
    _peak("TITAN", "RTX", fp32=16.3, fp16=130.5, sheet="NVIDIA TITAN RTX specification"),
    _peak("A40", fp32=37.4, tf32=74.8, bf16=149.7, sheet="NVIDIA A40 datasheet"),
    _peak("A30", fp32=10.3, tf32=82, bf16=165, sheet="NVIDIA A30 datasheet"),
    _peak("A10", fp32=31.2, tf32=62.5, bf16=125, sheet="NVIDIA A10 datasheet"),
    _peak("L40S", fp32=91.6, tf32=183, bf16=362.05, fp8=733, sheet="NVIDIA L40S datasheet"),
    _peak("L40", fp32=90.5, tf32=90.5, bf16=181.05, sheet="NVIDIA L40 datasheet"),
    _peak("L4", fp32=30.3, tf32=60, bf16=121, sheet="NVIDIA L4 datasheet"),
    _peak("V100S", fp32=16.4, fp16=130, sheet=_V100),
    _peak("V100", "PCIE", fp32=14, fp16=112, sheet=_V100),
    _peak("V100", fp32=15.7, fp16=125, sheet=_V100),
    _peak("T4", fp32=8.1, fp16=65, sheet="NVIDIA T4 datasheet"),
    # torch sees each of the card's two dies as a device: half of the sheet.
    _peak("MI250X", fp32=47.85, bf16=191.5, sheet="AMD Instinct MI250X data sheet, one of two dies"),
    _peak("MI210", fp32=45.3, bf16=181.0, sheet="AMD Instinct MI210 data sheet"),
    _peak("MI300X", fp32=163.4, tf32=653.7, bf16=1307.4, sheet="AMD Instinct MI300X data sheet"),
    _peak("MI325X", fp32=163.4, tf32=653.7, bf16=1307.4, fp8=2614.9, sheet="AMD Instinct MI325X data sheet"),
)  # fmt: skip


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
            rate = device.teraflops.get(dtype)
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
