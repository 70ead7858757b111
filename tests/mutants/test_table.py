"""The table of faults fits the source as it is."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.of_backends import OF_BACKENDS
from tests.mutants.table import MUTANTS

LEAST = 190
LEAST_OF_A_SUBSYSTEM = 3


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_fits_its_file_and_names_tests_that_exist(mutant: Mutant) -> None:
    """Where the text has changed: give the fault's new text, or plant it elsewhere (`make mutants`)."""
    given = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutant.stale(given) is None
    changed = mutant.applied(given)
    assert changed != given
    if mutant.file.endswith(".toml"):
        tomllib.loads(changed)
    else:
        compile(changed, mutant.file, "exec")
    for node in mutant.nodes:
        path, _, function = node.partition("[")[0].partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {function or 'test_.*'}\(", text, re.MULTILINE), node


def test_every_subsystem_has_faults() -> None:
    folders = {path.name for path in (ROOT / "harness").iterdir() if any(path.glob("[a-z]*.py"))}
    counts = Counter(mutant.subsystem for mutant in MUTANTS)
    assert len(MUTANTS) >= LEAST
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    few = {folder for folder in {*folders, "harness"} if counts[folder] < LEAST_OF_A_SUBSYSTEM}
    assert few == set()


def test_every_folder_of_adapters_has_faults() -> None:
    folders = {path.parent.name for path in (ROOT / "backends").glob("*/[a-z]*.py")}
    assert folders <= {Path(mutant.file).parent.name for mutant in OF_BACKENDS}
