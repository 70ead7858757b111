"""Temporaries of AdamW's update, by its implementation in torch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.theory.workload import Workload


def implementation(workload: Workload) -> str:
    """'for-loop', 'foreach' or 'fused'; by default torch takes 'foreach' on CUDA, 'for-loop' on the CPU.

    torch 2.13, `optim/optimizer.py`, `_default_to_fused_or_foreach`.
    """
    asked = str(getattr(workload, "optimizer_implementation", "default"))
    if asked != "default":
        return asked
    return "foreach" if workload.device == "cuda" and workload.offload == "none" else "for-loop"


def adam_temporaries(workload: Workload, groups: Sequence[Sequence[int]]) -> int:
    """Elements at the update's fullest moment; `groups`: elements of each tensor, by optimizer group.

    torch 2.13, `optim/adam.py`. `_single_tensor_adam`: `denom = (exp_avg_sq.sqrt() / correction).add_(eps)`
    holds root and quotient of one tensor beside the `denom` of the tensor before. `_multi_tensor_adam`: the
    roots of all tensors of a group. The fused kernel: nothing.
    """
    match implementation(workload):
        case "fused":
            return 0
        case "foreach":
            return max(map(sum, groups), default=0)
        case _:
            pairs = (
                (2 * now + before)
                for group in groups
                for before, now in zip([0, *group], group, strict=False)
            )
            return max(pairs, default=0)
