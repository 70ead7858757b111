"""AdamW with moments in 8 bits: torchao's, under a loop that sets the learning rate as a number, and
bitsandbytes'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from harness.backends.base import Unsupported
from harness.backends.optimizer_kinds import BLOCK_ELEMENTS, LEAST_ELEMENTS
from harness.spec import OptimizerSection

LIBRARIES = {"adamw-8bit": "torchao", "adamw-8bit-bnb": "bitsandbytes"}
MOMENTS = ("exp_avg", "exp_avg_sq", "state1", "state2")
"""As the two name them in their states."""


def build_low_bit(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW8bit with every constant explicit. Raises Unsupported where its library is missing."""
    library = LIBRARIES[section.kind]
    try:
        version(library)
    except PackageNotFoundError as error:
        raise Unsupported(
            f"optimizer.kind={section.kind} needs {library}, which is not installed: pip install {library}"
        ) from error
    return (_of_torchao if library == "torchao" else _of_bitsandbytes)(groups, section)


def _of_bitsandbytes(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    library: Any = import_module("bitsandbytes.optim")
    return library.AdamW8bit(  # type: ignore[no-any-return]
        groups,
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=section.weight_decay,
        min_8bit_size=LEAST_ELEMENTS,
    )


def _of_torchao(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
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
    local = _local(moment)
    return getattr(local, "codes", local).dtype  # type: ignore[no-any-return]


def wide_bytes(states: Iterable[tuple[int, Sequence[torch.Tensor]]]) -> int:
    """Bytes of this rank's moments that are not in 8 bits although the whole parameter is large enough.

    states: elements of the whole parameter, and the moments of what the rank updates of it.
    """
    large = [moment for elements, moments in states if elements >= LEAST_ELEMENTS for moment in moments]
    wide = [moment for moment in large if stored_dtype(moment).itemsize > 1]
    return sum(_local(moment).numel() * moment.element_size() for moment in wide)


def _local(moment: torch.Tensor) -> torch.Tensor:
    return moment.to_local() if hasattr(moment, "to_local") else moment  # type: ignore[no-any-return]
