"""The clean matrix on the CUDA stub: which cells there are, and what must hold of them."""

from __future__ import annotations

from harness.backends import registry
from harness.compare.comparison import Comparison
from harness.compare.findings.finding import Finding
from harness.doctor.check import ABOUT_TIME
from tests.built_in import PIPELINED, SEQUENCE, TENSOR
from tests.gpu_stub.machine import Machine

PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed")
RANKS = (2, 4)
TRAINER_FSDP = ("trainer-fsdp", "trainer-fsdp1")
HYBRID = ("fsdp-hybrid", "fsdp1-hybrid", "fsdp1-hybrid-grad-op")
UNSUPPORTED = {
    (label, 2): "hybrid sharding needs at least 2 replicas of at least 2 shards" for label in HYBRID
}
"""By label and number of ranks: how the reason begins. Nothing else may be unsupported."""


def labels(precision: str) -> list[str]:
    """Every built-in backend but the reference.

    The stub has no fused attention, which ranks that divide samples need; pipelines were not tried on it.
    Trainer's FSDP cannot be told to reduce in fp32 (test_trainer.py): at a mixed precision it has a finding.
    """
    left_out = () if precision == "fp32" else TRAINER_FSDP
    return [
        name
        for name, entry in registry.entries().items()
        if name not in (registry.REFERENCE, *left_out, *SEQUENCE, *PIPELINED, *TENSOR)
        and entry.target.startswith("harness.backends.")
    ]


def settings(precision: str) -> list[str]:
    """In fp16 more samples: with 8, gradients of 4 ranks overflow at the first loss scale."""
    larger = ["training.global_batch_size=16"] if precision == "fp16-mixed" else []
    return [f"training.precision={precision}", *larger]


def clean_comparison(machine: Machine, nproc: int, precision: str) -> Comparison:
    """All cells of one number of ranks and one precision next to their reference; the stub logs its calls."""
    return machine.compare(labels(precision), nproc, settings(precision), log=True)


def findings(comparison: Comparison) -> list[Finding]:
    """All but those that tell of a busy machine."""
    return [finding for finding in comparison.findings if finding.id not in ABOUT_TIME]
