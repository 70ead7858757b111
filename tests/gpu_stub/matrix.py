"""The clean matrix on the CUDA stub: which cells there are, and what must hold of them."""

from harness.backends import registry
from harness.doctor.self_check import ABOUT_TIME
from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from tests.built_in import SEQUENCE, strategy
from tests.gpu_stub.machine import Machine
from tests.traps.clean import LABELS

PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed")
RANKS = (2, 4)
TRAINER_FSDP = ("trainer-fsdp", "trainer-fsdp1")
HYBRID = ("fsdp-hybrid", "fsdp1-hybrid", "fsdp1-hybrid-grad-op")
CONTEXT = tuple(name for name in SEQUENCE if strategy(name).sequence == "ring")
"""They divide a fused kernel of attention, which the stub has none of."""
OTHER_STAGES = "GradScaler finds overflow in the gradients of its own stages only"
OTHER_PARTS = "GradScaler's overflow flag is not reduced over tensor-parallel ranks"


def unsupported(precision: str, nproc: int) -> dict[str, str]:
    """By label: words of the reason. Nothing else may be unsupported."""
    found = {}
    if precision == "fp16-mixed":
        found |= {LABELS["pp"]: OTHER_STAGES, LABELS["tp"]: OTHER_PARTS, "fsdp-tp": OTHER_PARTS}
    if nproc == 2:
        found |= dict.fromkeys(HYBRID, "hybrid sharding needs at least 2 replicas of at least 2 shards")
        found["fsdp-tp"] = "shard 1 x tensor 2 leaves nothing to shard"
    return found


def labels(precision: str) -> list[str]:
    """Every built-in backend but the reference.

    Trainer's FSDP cannot be told to reduce in fp32 (test_trainer.py): at a mixed precision it has a finding.
    """
    left_out = () if precision == "fp32" else TRAINER_FSDP
    return [
        LABELS.get(name, name)
        for name, entry in registry.entries().items()
        if name not in (registry.REFERENCE, *left_out, *CONTEXT)
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
