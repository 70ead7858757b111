"""The table of faults fits the source as it is."""

from collections import Counter

from tests.mutants.mutant import ROOT
from tests.mutants.table import MUTANTS

LEAST = 190
LEAST_OF_A_SUBSYSTEM = 3


def test_every_fault_has_its_place_and_its_tests() -> None:
    """Where a name or expression changed: give the fault the new one, or plant it where its guarantee is."""
    assert [reason for mutant in MUTANTS if (reason := mutant.stale()) is not None] == []


def test_every_subsystem_has_faults() -> None:
    folders = {path.name for path in (ROOT / "harness").iterdir() if any(path.glob("[a-z]*.py"))}
    counts = Counter(mutant.subsystem for mutant in MUTANTS)
    assert len(MUTANTS) >= LEAST
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    few = {folder for folder in {*folders, "harness"} if counts[folder] < LEAST_OF_A_SUBSYSTEM}
    assert few == set()


def test_every_folder_of_adapters_has_faults() -> None:
    folders = {path.parent.name for path in (ROOT / "backends").glob("*/[a-z]*.py")}
    assert folders <= {name for mutant in MUTANTS for name in mutant.file.split("/")[1:-1]}
