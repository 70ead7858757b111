"""One process: it holds everything and talks to nobody."""

from __future__ import annotations

from harness.forms.common_states import buffer_terms, replica_terms
from harness.forms.terms import ModelStates, Term, Volume, states
from harness.forms.workload import Workload


def model_states(workload: Workload) -> ModelStates:
    """A whole replica; `single:precision=cast` computes with a copy of it (`backends/single.py`)."""
    terms = replica_terms(workload)
    if workload.options.get("precision") == "cast" and workload.compute_bytes < workload.master_bytes:
        copy = workload.layout.parameter_count * workload.compute_bytes
        terms += [
            Term(kind="gathered", name="low-precision copy of the weights", bytes=copy, extra=True),
            *buffer_terms(workload),
        ]
    return states(terms)


def collectives(workload: Workload) -> Volume:
    """Nothing."""
    return Volume()
