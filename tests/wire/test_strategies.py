"""Every family of strategies against the kernel's byte counter, a step at a time."""

from __future__ import annotations

from statistics import median

import pytest

from tests.built_in import HYBRID, NATIVE
from tests.wire.namespace import Namespace

pytestmark = pytest.mark.long(seconds=15)


FEW = ("ddp", "fsdp", "fsdp1", "zero2", "zero3")


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
    ranks: int, precision: str, backends: tuple[str, ...], namespace: Namespace
) -> None:
    found = namespace.answer("strategies:steps", ranks, precision, backends)
    assert list(found) == list(backends)
    for backend, figures in found.items():
        assert figures["measured"], f"{backend}: every step sent segments twice"
        measured, derived = median(figures["measured"]), figures["derived"]
        print(f"{backend}: derived {derived:,.0f}, measured {measured:,.0f}")  # noqa: T201
        assert measured == pytest.approx(derived, rel=0.01), backend
