"""Model states as the ZeRO paper counts them (arXiv 1910.02054, section 5 and figure 1), per kind."""

from __future__ import annotations

SHARDED_KINDS: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("masters", "optimizer"),
    "zero2": ("masters", "optimizer", "gradients"),
    "zero3": ("masters", "optimizer", "gradients", "weights"),
}
STRATEGIES = {
    "single": "ddp",
    "ddp": "ddp",
    "zero0": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp": "zero3",
    "fsdp-grad-op": "zero2",
    "fsdp-hybrid": "zero3",
    "fsdp1": "zero3",
    "fsdp1-grad-op": "zero2",
    "fsdp1-no-shard": "ddp",
    "fsdp1-hybrid": "zero3",
    "accelerate-ddp": "ddp",
    "accelerate-zero1": "zero1",
    "accelerate-zero2": "zero2",
    "accelerate-zero3": "zero3",
    "accelerate-fsdp": "zero3",
    "accelerate-fsdp1": "zero3",
}
"""What each backend shards, in the paper's terms."""
ELEMENT_BYTES: dict[str, dict[str, int]] = {
    "mixed": {"weights": 2, "gradients": 2, "masters": 4, "optimizer": 8},
    "fp32": {"weights": 4, "gradients": 4, "masters": 0, "optimizer": 8},
    "bf16": {"weights": 2, "gradients": 2, "masters": 0, "optimizer": 4},
}


def textbook_states(backend: str, parameters: int, shards: int, precision: str) -> dict[str, float] | None:
    """Bytes per rank and kind with Adam; None for a backend that the paper's terms do not cover.

    Mixed precision, per parameter: 2 weights, 2 gradients, 12 of fp32 master and moments: DDP 16 P, ZeRO-1
    4 P + 12 P / N, ZeRO-2 2 P + 14 P / N, ZeRO-3 16 P / N. All fp32: 4, 4 and 8.
    """
    strategy = STRATEGIES.get(backend)
    if strategy is None:
        return None
    widths = ELEMENT_BYTES["mixed" if precision.endswith("-mixed") else precision]
    return {
        kind: width * parameters / (shards if kind in SHARDED_KINDS[strategy] else 1)
        for kind, width in widths.items()
    }
