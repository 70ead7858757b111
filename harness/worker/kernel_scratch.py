"""What kernels allocate inside themselves for a moment, by device: no operator's result shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten.addmm.default}
ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FP32_UNDER_CUDA_AUTOCAST = {
    torch.nn.functional.layer_norm, torch.nn.functional.group_norm, torch.nn.functional.softmax,
    torch.nn.functional.log_softmax, torch.softmax, torch.log_softmax, torch.Tensor.softmax, torch.exp,
    torch.rsqrt, torch.Tensor.rsqrt, torch.pow, torch.Tensor.pow, torch.cumsum, torch.Tensor.cumsum,
}  # fmt: skip
"""Of torch 2.13, `ATen/autocast_mode.h`, AT_FORALL_FP32: what language models call of it, and what CPU
autocast leaves in low precision."""

Scratch = Callable[[Any, tuple[Any, ...], Any], int]
"""(operator, arguments, result) -> bytes."""


def kernel_scratch(device: str) -> Scratch:
    """The rule for 'cpu' or 'cuda'."""
    return _cuda if device == "cuda" else _cpu


def _cpu(operator: Any, args: tuple[Any, ...], result: Any) -> int:
    """oneDNN adds products of bf16 up in an fp32 copy of the result where the processor has no bf16 products;
    the flash kernel's backward pass has a copy of the output's gradient."""
    if operator in PRODUCTS and result.dtype == torch.bfloat16 and not _multiplies_bf16():
        return 4 * int(result.numel())
    if operator is ATTENTION_BACKWARD:
        return _bytes(args[0])
    return 0


def _cuda(operator: Any, args: tuple[Any, ...], result: Any) -> int:
    """Flash attention's backward pass adds the query's gradient up in fp32, and with fewer key heads than
    query heads makes the gradients of keys and values for every query head (torch 2.13,
    flash_attn/flash_api.cpp, mha_bwd)."""
    if operator is not ATTENTION_BACKWARD:
        return 0
    query, key = args[1], args[2]
    expanded = 2 * _bytes(query) if key.shape[1] != query.shape[1] else 0
    return 4 * int(query.numel()) + expanded


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel()) * tensor.element_size()


def _multiplies_bf16() -> bool:
    """Whether the processor multiplies matrices of bf16 (AVX512-BF16, AMX)."""
    capable: Any = torch.cpu
    return any(
        getattr(capable, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )


class CudaAutocast(TorchFunctionMode):
    """Lets CPU autocast do what CUDA's does: some functions compute in fp32."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in FP32_UNDER_CUDA_AUTOCAST and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(value) for value in args)
            kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
