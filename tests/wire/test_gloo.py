"""The table of transports against the kernel's own byte counters."""

from __future__ import annotations

import json
import sys

import pytest

from harness.theory.transports import transport_sent_bytes
from tests.wire.namespace import require_namespace, run_in_namespace

pytestmark = pytest.mark.long(seconds=10)

PAYLOAD = 10**6


@pytest.mark.parametrize("world_size", [2, 4])
def test_gloo_sends_what_the_table_says(world_size: int) -> None:
    require_namespace()
    command = [sys.executable, "-m", "tests.wire.collectives", str(world_size)]
    measured = json.loads(run_in_namespace(command).splitlines()[-1])
    assert len(measured) == 5
    for name, factor in measured.items():
        op = name.partition(" ")[0]
        expected = transport_sent_bytes("gloo", op, PAYLOAD, world_size) / PAYLOAD
        assert factor == pytest.approx(expected, rel=0.01), (name, measured)
