"""AdamW with moments in 8 bits: torchao's, under a loop that sets the learning rate as a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from harness.backends.base import Unsupported
from harness.spec import OptimizerSection
from harness.theory.optimizer_states import BLOCK_ELEMENTS, LEAST_ELEMENTS


def build_low_bit(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """torchao's AdamW8bit with every constant explicit. Raises Unsupported where torchao is missing."""
    try:
        version("torchao")
    except PackageNotFoundError as error:
        raise Unsupported(
            "optimizer.kind=adamw-8bit needs torchao, which is not installed: pip install torchao"
        ) from error
    from torchao.optim import AdamW8bit

    class LowBitAdamW(AdamW8bit):  # type: ignore[misc]
        """torchao 0.18 takes the learning rate as a tensor only."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            rates = [group["lr"] for group in self.param_groups]
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = torch.as_tensor(rate, dtype=torch.float32)
            try:
                with _without_compiling(self.param_groups):
                    return super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate

    return LowBitAdamW(
        groups,
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        amsgrad=False,
        block_size=BLOCK_ELEMENTS,
    )


def _without_compiling(groups: Sequence[dict[str, Any]]) -> Any:
    """torchao compiles its update for each shape, which takes minutes on the CPU; eagerly it is the same."""
    on_cpu = all(parameter.device.type == "cpu" for group in groups for parameter in group["params"])
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()


def stored_dtype(moment: torch.Tensor) -> torch.dtype:
    """Dtype of the elements that lie in memory: a quantised tensor shows the dtype that it stands for."""
    local = moment.to_local() if hasattr(moment, "to_local") else moment
    return getattr(local, "codes", local).dtype  # type: ignore[no-any-return]


def wide_bytes(moments: Sequence[torch.Tensor]) -> int:
    """Bytes of moments that are not in 8 bits although they are large enough for it."""
    local = [m.to_local() if hasattr(m, "to_local") else m for m in moments]
    return sum(
        m.numel() * m.element_size()
        for m in local
        if stored_dtype(m).itemsize > 1 and m.numel() >= LEAST_ELEMENTS
    )
