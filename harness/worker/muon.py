"""Muon for the matrices of blocks and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from harness.backends.base import Unsupported
from harness.backends.blocks import transformer_blocks
from harness.spec import OptimizerSection

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
LEAST_NORM = 1e-7
"""Defaults of torch.optim.Muon, which are K. Jordan's ('Muon: an optimizer for hidden layers in neural
networks', 2024)."""
RMS_OF_ADAMW = 0.2
"""Scale at which updates are as large as AdamW's (`match_rms_adamw`; J. Liu et al., arXiv 2502.16982)."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FLAG = "muon"
"""Key of the groups that Muon updates."""
MOMENTUM_KEY = "momentum_buffer"
"""As torch.optim.Muon names it in its state."""


class MuonAndAdamW(torch.optim.AdamW):
    """The update of torch.optim.Muon for the flagged groups, of torch.optim.AdamW for the others.

    A matrix that ranks share is gathered first: its parts orthogonalised one by one are not the matrix
    orthogonalised. torch's Muon computes on DTensors as they are, which adds partial products up in bf16.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"] if group.get(FLAG) else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.param_groups = [group for group in groups if not group.get(FLAG)]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if MOMENTUM_KEY not in state:
            state[MOMENTUM_KEY] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer = state[MOMENTUM_KEY]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]).to(DTYPES[group["newton_schulz"]])
        rate = group["lr"]
        whole = orthogonalised(_whole(update))
        own, held = _own_part(whole, parameter), _local(parameter)
        held.mul_(1 - rate * group["weight_decay"])
        held.add_(own, alpha=-rate * RMS_OF_ADAMW * math.sqrt(max(parameter.shape)))


def orthogonalised(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: five Newton-Schulz iterations.

    matrix: two dimensions, computed on in its own dtype. As `_zeropower_via_newtonschulz` of torch 2.13
    (`optim/_muon.py`), which always computes in bf16.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def build_muon(
    matrices: list[nn.Parameter], groups: list[dict[str, Any]], section: OptimizerSection
) -> torch.optim.Optimizer:
    """matrices: those of blocks, which all decay. groups: the rest, as AdamW takes them."""
    flagged = {
        "params": matrices, FLAG: True, "momentum": MOMENTUM, "newton_schulz": section.newton_schulz,
        "weight_decay": section.weight_decay,
    }  # fmt: skip
    optimizer = MuonAndAdamW(
        [*([flagged] if matrices else []), *groups],
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        amsgrad=False,
    )
    for group in optimizer.param_groups:
        for key in ("betas", "eps") if group.get(FLAG) else ():
            del group[key]  # AdamW's, which it gives to every group
    return optimizer


def block_matrices(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the trained parameters of two dimensions within blocks; none where no blocks are known."""
    try:
        blocks = tuple(f"{name}." for name in transformer_blocks(model))
    except Unsupported:
        return {}
    return {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and name.startswith(blocks)
    }


def orthogonalised_in_parts(
    matrices: Mapping[str, torch.Size], optimizers: Iterable[torch.optim.Optimizer]
) -> int:
    """Matrices of which no optimizer keeps the momentum whole, and so orthogonalises parts or nothing."""
    momenta = [state.get(MOMENTUM_KEY) for optimizer in optimizers for state in optimizer.state.values()]
    held = Counter(tuple(momentum.shape) for momentum in momenta if isinstance(momentum, Tensor))
    return (Counter(map(tuple, matrices.values())) - held).total()


def _whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered on the mesh's device; a collective. Any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded rows lie on the CPU while NCCL gathers device memory only.
    here: Any = tensor.to(tensor.device_mesh.device_type)
    return here.full_tensor()  # type: ignore[no-any-return]


def _own_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """What this rank holds of it, where it holds the parameter; nothing is sent."""
    if not isinstance(parameter, DTensor):
        return whole
    cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return cut.to_local().to(_local(parameter).device)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
