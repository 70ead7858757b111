"""Bytes that a rank sends: ring factors of collectives, and the textbook volume of each strategy.

Factors are the bus-bandwidth factors of nccl-tests (doc/PERFORMANCE.md); strategies follow the ZeRO
paper (arXiv 1910.02054, section 7) and the FSDP paper (arXiv 2304.11277).
"""

from __future__ import annotations

RING_PASSES = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "broadcast": 1,
    "reduce": 1,
    "gather": 1,
    "scatter": 1,
    "barrier": 0,
}


def ring_sent_bytes(op: str, payload_bytes: int, group_size: int) -> float:
    """Bytes that one rank of a ring sends, on average, for a collective on `payload_bytes`.

    passes x (n - 1) / n x payload; all-reduce has two passes, a barrier none, the others one.
    `send` sends what it is given and `recv` nothing. Raises KeyError for a collective without a factor.
    """
    if op in ("send", "recv"):
        return float(payload_bytes) if op == "send" else 0.0
    # Whole numbers up to the division, which rounds once.
    return RING_PASSES[op] * (group_size - 1) * payload_bytes / group_size


def textbook_sent_bytes(
    strategy: str,
    parameters: int,
    world_size: int,
    *,
    weight_bytes: int,
    reduce_bytes: int,
    shard_size: int | None = None,
) -> float | None:
    """Bytes that a rank sends per optimizer step with one synchronisation; None: no closed form here.

    With P parameters, f = (N - 1) / N, w and r bytes per element of gathered weights and reduced
    gradients: DDP 2 f P r; ZeRO-1 and ZeRO-2 and SHARD_GRAD_OP f P (w + r); ZeRO-3 and FULL_SHARD
    f P (2 w + r); hybrid the same within S ranks, plus an all-reduce of P / S over N / S replicas.
    """
    fraction = (world_size - 1) / world_size
    match strategy:
        case "single":
            return 0.0
        case "ddp":
            return 2 * fraction * parameters * reduce_bytes
        case "grad-op":
            return fraction * parameters * (weight_bytes + reduce_bytes)
        case "full-shard":
            return fraction * parameters * (2 * weight_bytes + reduce_bytes)
        case "hybrid":
            if not shard_size:
                return None
            replicas = world_size // shard_size
            inside = (shard_size - 1) / shard_size * parameters * (2 * weight_bytes + reduce_bytes)
            across = 2 * (replicas - 1) / replicas * parameters / shard_size * reduce_bytes
            return inside + across
        case _:
            return None
