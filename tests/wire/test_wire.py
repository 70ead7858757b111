"""Bytes that are derived of collectives against the kernel's byte counter of the loopback interface.

The headers of the packets are taken off (66 bytes each); nothing else is, and figures must agree within 1 %.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from harness.forms.network import transport_sent_bytes
from harness.judge.quantities import sent_bytes_per_step, transport_bytes_per_step
from harness.record.store import read_runs
from tests.built_in import HYBRID, NATIVE
from tests.representatives import first
from tests.wire.measured import Traffic

pytestmark = pytest.mark.long(seconds=35)

PAYLOAD = 10**6
PROBED = 10
RANKS = 2
FEW = ("ddp", "fsdp", "fsdp1", "zero2", "zero3")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.costly
def test_gloo_sends_what_the_table_says(world_size: int, measured: Callable[..., Any]) -> None:
    factors = measured("factors", world_size)
    assert len(factors) == 5
    for name, factor in factors.items():
        op = name.partition(" ")[0]
        expected = transport_sent_bytes("gloo", op, PAYLOAD, world_size) / PAYLOAD
        assert factor == pytest.approx(expected, rel=0.01), (name, factors)


@pytest.mark.parametrize(
    ("ranks", "precision", "backends"),
    [
        pytest.param(2, "fp32", FEW, marks=pytest.mark.exhaustive),
        pytest.param(2, "fp32", NATIVE, marks=pytest.mark.exhaustive),
        pytest.param(2, "bf16-mixed", FEW, marks=pytest.mark.exhaustive),
        (2, "fp32", FEW[1:2]),
        pytest.param(4, "fp32", HYBRID[:1], marks=pytest.mark.costly),
        pytest.param(4, "fp32", HYBRID, marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_moves_what_its_collectives_say(
    ranks: int, precision: str, backends: tuple[str, ...], measured: Callable[..., Any]
) -> None:
    found = measured("steps", ranks, precision, backends)
    assert list(found) == list(backends)
    for backend, figures in found.items():
        assert figures["measured"], f"{backend}: every step sent segments twice"
        moved, derived = median(figures["measured"]), figures["derived"]
        print(f"{backend}: derived {derived:,.0f}, measured {moved:,.0f}")  # noqa: T201
        assert moved == pytest.approx(derived, rel=0.01), backend


@pytest.mark.parametrize("backend", first(["fsdp"], ["ddp", "fsdp", "zero3"]))
@pytest.mark.costly
def test_probed_steps_move_what_the_record_says(
    backend: str, tmp_path: Path, measured: Callable[..., Any]
) -> None:
    """Two runs are alike but for the probed steps: the difference of their counters is what those moved."""
    moved = Traffic(**measured("moved_by_probed_steps", str(tmp_path), backend, RANKS, PROBED))
    ((_, record),), _ = read_runs([tmp_path / "with" / "runs"])
    derived = transport_bytes_per_step(record)
    assert derived is not None
    per_step = moved.payload_bytes / PROBED / RANKS
    print(f"{backend}: derived {derived:,.0f}, measured {per_step:,.0f}, {moved}")  # noqa: T201
    assert per_step == pytest.approx(derived, rel=0.01)
    if backend != "ddp":  # what tells gloo's reduce-scatter from a ring's
        assert per_step != pytest.approx(sent_bytes_per_step(record), rel=0.1)
