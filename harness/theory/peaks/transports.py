"""Temporaries of the transport itself."""

from __future__ import annotations

from harness.theory.peaks.ledger import Holding
from harness.theory.workload import Workload

GLOO_GATHER = Holding(
    kind="communication", name="gloo's copy of what it gathers", formula="the gathered bytes",
    source="torch 2.13, csrc/distributed/c10d/ProcessGroupGloo.cpp",
)  # fmt: skip
GLOO_REDUCE_SCATTER = Holding(
    kind="communication", name="gloo's copy of what it reduces", formula="the reduced bytes",
    source="torch 2.13, csrc/distributed/c10d/ProcessGroupGloo.cpp: reduce-scatter is an all-reduce",
)  # fmt: skip


def gathering(workload: Workload, size: int) -> tuple[Holding, int]:
    """While `size` bytes are gathered."""
    return GLOO_GATHER, size if workload.transport == "gloo" else 0


def reduce_scattering(workload: Workload, size: int) -> tuple[Holding, int]:
    """While `size` bytes are reduced and scattered."""
    return GLOO_REDUCE_SCATTER, size if workload.transport == "gloo" else 0
