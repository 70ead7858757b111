"""Known traps on devices of the stub: findings that rest on dtypes, memory, units or collectives."""

import sys
from collections.abc import Iterator

import pytest

from tests.gpu_stub.machine import Machine
from tests.gpu_stub.matrix import findings
from tests.representatives import first
from tests.traps.matrix import install
from tests.traps.planted import TRAPS, Trap

NAMES = (
    "T01", "T02", "T03", "T04", "T06", "T08", "T12", "T15", "T16", "T17 never", "T17 always", "T21 TF32",
    "T22", "T24", "unseen stale weights", "unseen loss of rank 0",
)  # fmt: skip
FEW = ("T01", "T03", "T17 never", "T24", "unseen stale weights")
"""A dtype, a setting, a collective, memory and weights."""


@pytest.fixture(scope="module")
def planted(machine: Machine) -> Iterator[Machine]:
    """The machine, on which the broken adapters are known."""
    site = machine.folder / "site"
    if not site.exists():
        install(site)
    yield machine
    sys.path.remove(str(site))


@pytest.mark.parametrize("name", first(FEW, NAMES))
def test_a_planted_trap_is_named(name: str, planted: Machine) -> None:
    trap: Trap = next(trap for trap in TRAPS if trap.name == name)
    comparison = planted.compare([*trap.compared_with, trap.label], trap.world_size, trap.settings)
    found = findings(comparison)
    named = [one for one in found if one.id == trap.finding and trap.says in one.message]
    assert named, [(one.id, one.message) for one in found]
    assert {one.id for one in found} - {"diverged"} <= {trap.finding, *trap.also}
