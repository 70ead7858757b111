"""Which options have DeepSpeed compile C++ extensions. Importable without torch and DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.backends.base import BackendOptions, OptimizerKind

CPU_ADAM = "cpu_adam"
ASYNC_IO = "async_io"
PIN_MEMORY = "pin_memory"
"""`async_io` compiles and loads it first."""
WEIGHT_BUFFERS = ("buffer_count", "buffer_size")
"""Options of the buffers through which weights are read."""


def runs_cpu_adam(options: BackendOptions) -> bool:
    """Whether DeepSpeed's Adam replaces the job's."""
    return getattr(options, "adam", None) == "deepspeed"


def offloads(options: BackendOptions) -> bool:
    """Whether weights, gradients and optimizer states live in host memory."""
    return getattr(options, "offload", "none") == "cpu"


def swaps_into_files(options: BackendOptions) -> bool:
    """Whether optimizer states lie in files between updates."""
    return getattr(options, "offload", "none") in ("nvme", "nvme-all")


def swaps_weights(options: BackendOptions) -> bool:
    """Whether weights lie in files while no module uses them."""
    return getattr(options, "offload", "none") == "nvme-all"


def unmet_files(options: BackendOptions, stage: int) -> list[str]:
    """Why a stage cannot swap its states into files as asked; empty: it can."""
    if not swaps_into_files(options):
        return []
    if stage != 3:
        return [f"DeepSpeed offloads to NVMe at stage 3 only, not {stage}; use offload=optimizer"]
    if swaps_weights(options) and getattr(options, "hpz", None) is not None:
        return ["hpz keeps its second copy where the weights lie, which cannot be a file; use offload=nvme"]
    return []


def unmet_buffers(options: BackendOptions) -> list[str]:
    """Why buffers of weights would be ignored; empty: they are not, or none are asked for."""
    given = [name for name in WEIGHT_BUFFERS if getattr(options, name, None) is not None]
    if not given or swaps_weights(options):
        return []
    return [f"{' and '.join(given)}: without offload=nvme-all no buffer is there to have this size or number"]


def extensions(options: BackendOptions) -> tuple[str, ...]:
    """Names, in the order in which they are to be compiled."""
    adam = (CPU_ADAM,) if runs_cpu_adam(options) and not unmet_cpu_adam(options) else ()
    return (*adam, *((ASYNC_IO,) if swaps_into_files(options) else ()))


def unmet_cpu_adam(options: BackendOptions) -> list[str]:
    """Why the options leave DeepSpeed's Adam nothing to do; empty: they do not."""
    if not runs_cpu_adam(options) or getattr(options, "offload", "none") != "none":
        return []
    return ["adam=deepspeed updates states in host memory: it needs offload=optimizer, cpu, nvme or nvme-all"]


def why_not_replaced(options: BackendOptions, kind: OptimizerKind) -> str | None:
    """Why DeepSpeed's Adam cannot take the place of the job's optimizer; None: it can, or is not asked for.

    Of a user's own optimizer only the object says whether it is an AdamW.
    """
    if not runs_cpu_adam(options) or kind in ("adamw", "own"):
        return None
    return f"adam=deepspeed replaces AdamW, not optimizer.kind={kind}; leave adam out, or use adamw"
