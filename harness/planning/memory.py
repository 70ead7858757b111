"""Predicted memory of one rank: what it holds, and its peak at the three moments that can decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.planning.scenario import Scenario
from harness.theory.families import model_states

MomentName = Literal["forward/backward", "gradient reduction", "optimizer step"]


@dataclass(frozen=True, kw_only=True)
class MemoryTerm:
    """A part of what lies in memory at one moment."""

    kind: str
    """'weights', 'gathered', 'gradients', 'masters', 'optimizer', 'activations', 'communication', 'buffers',
    'data' or 'temporary'."""
    name: str
    bytes: int
    formula: str
    """With the symbols of `docs/estimate.md`, such as '2 b s h L'."""
    source: str
    """Paper, or library with version, file and function."""
    host: bool = False


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One moment of an ordinary step at its fullest."""

    name: MomentName
    terms: tuple[MemoryTerm, ...]

    @property
    def device_bytes(self) -> int:
        return sum(term.bytes for term in self.terms if not term.host)


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Memory of the rank that needs most."""

    moments: tuple[Moment, ...]
    overhead: tuple[MemoryTerm, ...] = ()
    """Outside of the allocator's peak: fragmentation, CUDA context, NCCL's buffers."""
    host_bytes_per_node: int = 0

    @property
    def decisive(self) -> Moment:
        """The moment with the highest peak."""
        return max(self.moments, key=lambda moment: moment.device_bytes)

    @property
    def peak_bytes(self) -> int:
        """What the allocator's peak will say (max_memory_allocated)."""
        return self.decisive.device_bytes

    @property
    def device_bytes(self) -> int:
        """What nvidia-smi will say."""
        return self.peak_bytes + sum(term.bytes for term in self.overhead if not term.host)


def predict_memory(scenario: Scenario) -> MemoryPrediction:
    """Predict for the rank that needs most."""
    states = model_states(scenario.workload())
    terms = tuple(
        MemoryTerm(
            kind=term.kind,
            name=term.name,
            bytes=term.bytes,
            formula="",
            source="harness.theory",
            host=term.host,
        )
        for term in states.terms
    )
    return MemoryPrediction(moments=(Moment(name="forward/backward", terms=terms),))
