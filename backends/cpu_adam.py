"""DeepSpeed's own Adam for states in host memory, with the constants of the job's AdamW. DeepSpeed 0.19."""

from __future__ import annotations

import torch

from harness.backends.unsupported import Unsupported

CONSTANTS = ("params", "lr", "betas", "eps", "weight_decay", "maximize")
"""It knows no `maximize`; the key says that it is false, as in the job's."""


def cpu_adam(optimizer: torch.optim.Optimizer, *, fp32_states: bool) -> torch.optim.Optimizer:
    """`DeepSpeedCPUAdam` over the same groups, its states in fp32 or in the parameters' dtype.

    Steps are counted as plain numbers. The kernel computes in fp32 whatever the parameters' dtype
    (`Adam_Optimizer::Step_1`, csrc/adam/cpu_adam_impl.cpp). Raises Unsupported unless `optimizer` is AdamW.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not isinstance(optimizer, torch.optim.AdamW):
        raise Unsupported(f"adam=deepspeed replaces AdamW, not {type(optimizer).__name__}")
    groups = [{key: group[key] for key in CONSTANTS} for group in optimizer.param_groups]
    first = groups[0]
    replacement: torch.optim.Optimizer = DeepSpeedCPUAdam(
        groups,
        lr=first["lr"],
        betas=first["betas"],
        eps=first["eps"],
        adamw_mode=True,
        fp32_optimizer_states=fp32_states,
    )
    return replacement
