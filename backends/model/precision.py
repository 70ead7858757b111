"""What a precision means: compute dtype, whether autocast provides it, and dtype names."""

from __future__ import annotations

import torch
from torch import nn

from harness.backends.base import LossScale, Precision, SetupContext

COMPUTE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "fp16-mixed": torch.float16,
    "bf16": torch.bfloat16,
}


def compute_dtype(precision: Precision) -> torch.dtype:
    """Dtype in which matrix products run."""
    return COMPUTE_DTYPES[precision]


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Dtype that autocast provides where the weights stay fp32; None: no autocast."""
    return COMPUTE_DTYPES[precision] if precision.endswith("-mixed") else None


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast in place; unlike `Module.to` this leaves buffers, such as rotary frequencies, as they are."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def scaler_arguments(loss_scale: LossScale) -> dict[str, float | int]:
    """The job's constants under the names of `torch.amp.GradScaler`."""
    return {
        "init_scale": loss_scale.initial,
        "growth_factor": loss_scale.growth_factor,
        "backoff_factor": loss_scale.backoff_factor,
        "growth_interval": loss_scale.growth_interval,
    }


def grad_scaler(context: SetupContext) -> torch.amp.GradScaler | None:
    """The dynamic loss scaler of fp16-mixed; None at every other precision."""
    if context.precision != "fp16-mixed":
        return None
    return torch.amp.GradScaler(context.world.device, **scaler_arguments(context.loss_scale))  # type: ignore[arg-type]
