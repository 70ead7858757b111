"""The textbook's collectives, under the terms of the implementations, and what explains the difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.theory.expected.setting import (
    BACKWARD,
    DTYPE_BYTES,
    FORWARD,
    GRADIENTS,
    REPLICAS,
    UPDATED,
    Collective,
    Setting,
    Volume,
)
from harness.theory.strategies import TEXTBOOK

STEP_PHASES = ("forward", "backward", "step")


@dataclass(frozen=True, kw_only=True)
class TermDifference:
    """One cause of what an implementation sends beyond the textbook, or less."""

    term: str
    expected_bytes: float
    """Ring bytes per rank and step."""
    textbook_bytes: float
    remark: str

    @property
    def difference(self) -> float:
        return self.expected_bytes - self.textbook_bytes


def textbook_collectives(
    backend: str, setting: Setting, *, weight_dtype: str, reduce_dtype: str
) -> list[Collective] | None:
    """What `theory.communication.textbook_sent_bytes` adds up, collective by collective; None: unknown."""
    strategy = TEXTBOOK.get(backend)
    weights = setting.parameter_count * DTYPE_BYTES[weight_dtype]
    gradients = setting.parameter_count * DTYPE_BYTES[reduce_dtype]
    role = "shard" if strategy == "hybrid" else "world"

    def gather(phase: str, term: str) -> Collective:
        return Collective(
            phase=phase, op="all_gather", dtype=weight_dtype, term=term, payload_bytes=weights,
            role=role,  # type: ignore[arg-type]
        )  # fmt: skip

    def reduce(op: str) -> Collective:
        return Collective(
            phase="backward", op=op, dtype=reduce_dtype, term=GRADIENTS, payload_bytes=gradients,
            role=role,  # type: ignore[arg-type]
        )  # fmt: skip

    match strategy:
        case "single":
            return []
        case "ddp":
            return [reduce("all_reduce")]
        case "grad-op":
            once = gather("step", UPDATED) if "zero" in backend else gather("forward", FORWARD)
            return [once, reduce("reduce_scatter")]
        case "full-shard" | "hybrid":
            found = [gather("forward", FORWARD), gather("backward", BACKWARD), reduce("reduce_scatter")]
            if strategy == "hybrid":
                found.append(
                    Collective(
                        phase="backward", op="all_reduce", dtype=reduce_dtype, term=REPLICAS,
                        payload_bytes=gradients // setting.shard_size, role="replica",
                    )
                )  # fmt: skip
            return found
        case _:
            return None


def explain(setting: Setting, volume: Volume, textbook: Iterable[Collective]) -> list[TermDifference]:
    """Expected minus textbook, term by term, per step; terms that agree are left out.

    The differences add up to the whole difference.
    """
    expected = _by_term(setting, (c for c in volume.collectives if c.phase in STEP_PHASES))
    steps = len(setting.steps)
    given = _by_term(setting, textbook)
    remarks = dict(volume.remarks)
    found = []
    for term in dict.fromkeys((*given, *expected)):
        ours, theirs = expected.get(term, 0.0) / steps, given.get(term, 0.0)
        if ours != theirs:
            found.append(
                TermDifference(
                    term=term,
                    expected_bytes=ours,
                    textbook_bytes=theirs,
                    remark=remarks.get(term, "" if theirs else "the textbook leaves it out"),
                )
            )
    return found


def _by_term(setting: Setting, collectives: Iterable[Collective]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for collective in collectives:
        sums[collective.term] = sums.get(collective.term, 0.0) + collective.sent_bytes(setting)
    return sums
