"""Bytes that a rank of a ring sends for a collective: the bus-bandwidth factors of nccl-tests
(doc/PERFORMANCE.md)."""

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
MESSAGES = ("permute", "send", "recv")
"""From one rank to one other."""
OPERATIONS = frozenset({*RING_PASSES, *MESSAGES})
"""Every collective and message that is counted."""


def ring_sent_bytes(op: str, payload_bytes: int, group_size: int) -> float:
    """Bytes that one rank of a ring sends, on average, for a collective on `payload_bytes`.

    passes x (n - 1) / n x payload; all-reduce has two passes, a barrier none, the others one.
    `send` and `permute`, which hands all of it to one other rank, send what they are given, `recv` nothing.
    Raises KeyError for a collective without a factor.
    """
    if op == "permute":
        return float(payload_bytes) if group_size > 1 else 0.0
    if op in ("send", "recv"):
        return float(payload_bytes) if op == "send" else 0.0
    # Whole numbers up to the division, which rounds once.
    return RING_PASSES[op] * (group_size - 1) * payload_bytes / group_size


def ring_formula(op: str, payload_bytes: int, group_size: int) -> str:
    """How `ring_sent_bytes` comes about, with its figures, in bytes."""
    if op == "recv":
        return "0 bytes: the other side sends them"
    if op in MESSAGES:
        return f"all {payload_bytes:,} bytes, to the next rank"
    passes = RING_PASSES[op]
    factor = f"{passes} x " if passes != 1 else ""
    return f"{factor}({group_size} - 1) / {group_size} x {payload_bytes:,} bytes"
