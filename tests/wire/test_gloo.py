"""The table of transports against the kernel's own byte counters."""

from __future__ import annotations

import pytest

from harness.forms.network import transport_sent_bytes
from tests.wire.namespace import Namespace

pytestmark = pytest.mark.long(seconds=10)

PAYLOAD = 10**6


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.costly
def test_gloo_sends_what_the_table_says(world_size: int, namespace: Namespace) -> None:
    measured = namespace.answer("collectives:factors", world_size)
    assert len(measured) == 5
    for name, factor in measured.items():
        op = name.partition(" ")[0]
        expected = transport_sent_bytes("gloo", op, PAYLOAD, world_size) / PAYLOAD
        assert factor == pytest.approx(expected, rel=0.01), (name, measured)
