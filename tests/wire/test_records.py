"""Bytes that a record derives against the kernel's byte counter of the loopback interface.

Two runs in a fresh namespace are alike but for the probed steps, which the second has and the first has
not: the difference of their counters is what those steps moved. The headers of the packets are taken off
(66 bytes each); nothing else is, and both figures must agree within 1 %.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.judge.quantities import sent_bytes_per_step, transport_bytes_per_step
from harness.record.store import read_runs
from tests.representatives import first
from tests.wire.namespace import Namespace, Traffic

pytestmark = pytest.mark.long(seconds=10)

PROBED = 10
RANKS = 2


# What a step of each other strategy sends: tests/wire/test_strategies.py.
@pytest.mark.parametrize("backend", first(["fsdp"], ["ddp", "fsdp", "zero3"]))
@pytest.mark.costly
def test_probed_steps_move_what_the_record_says(backend: str, tmp_path: Path, namespace: Namespace) -> None:
    moved = Traffic(**namespace.answer("job:moved_by_probed_steps", str(tmp_path), backend, RANKS, PROBED))
    ((_, record),), _ = read_runs([tmp_path / "with" / "runs"])
    derived = transport_bytes_per_step(record)
    assert derived is not None
    measured = moved.payload_bytes / PROBED / RANKS
    print(f"{backend}: derived {derived:,.0f}, measured {measured:,.0f}, {moved}")  # noqa: T201
    assert measured == pytest.approx(derived, rel=0.01)
    if backend != "ddp":  # what tells gloo's reduce-scatter from a ring's
        assert measured != pytest.approx(sent_bytes_per_step(record), rel=0.1)
