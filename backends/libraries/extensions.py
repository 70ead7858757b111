"""Which options have DeepSpeed compile C++ extensions. Importable without torch and DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.backends.base import BackendOptions, OptimizerKind

CPU_ADAM = "cpu_adam"


def runs_cpu_adam(options: BackendOptions) -> bool:
    """Whether DeepSpeed's Adam replaces the job's."""
    return getattr(options, "adam", None) == "deepspeed"


def offloads(options: BackendOptions) -> bool:
    """Whether weights, gradients and optimizer states live in host memory."""
    return getattr(options, "offload", "none") == "cpu"


def extensions(options: BackendOptions) -> tuple[str, ...]:
    """Names, in the order in which they are to be compiled."""
    return (CPU_ADAM,) if runs_cpu_adam(options) and not unmet_cpu_adam(options) else ()


def unmet_cpu_adam(options: BackendOptions) -> list[str]:
    """Why the options leave DeepSpeed's Adam nothing to do; empty: they do not."""
    if not runs_cpu_adam(options) or getattr(options, "offload", "none") != "none":
        return []
    return ["adam=deepspeed updates states in host memory: it needs offload=optimizer or cpu"]


def why_not_replaced(options: BackendOptions, kind: OptimizerKind) -> str | None:
    """Why DeepSpeed's Adam cannot take the place of the job's optimizer; None: it can, or is not asked for.

    Of a user's own optimizer only the object says whether it is an AdamW.
    """
    if not runs_cpu_adam(options) or kind in ("adamw", "own"):
        return None
    return f"adam=deepspeed replaces AdamW, not optimizer.kind={kind}; leave adam out, or use adamw"
