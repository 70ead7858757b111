"""Backends whose ranks cut layers or divide samples: training, traffic and states."""

from pathlib import Path

import pytest

from tests.built_in import MULTIPLYING, SEQUENCE
from tests.contract.deeds import CASES, Trace
from tests.contract.ranks import traces
from tests.contract.test_communication import assert_derived
from tests.contract.test_contract import violations
from tests.representatives import first

CUTTING = [
    ("tp", 2), ("fsdp-tp", 4), ("fsdp-tp:sync_each_batch=true", 4), ("tp:tensor=2", 4), ("autotp-zero1", 2),
    ("autotp-zero3", 2), ("autotp-zero1", 4), ("autotp-zero2", 4), ("autotp-zero3", 4),
]  # fmt: skip
"""The clean matrix (tests/traps/test_clean.py) has every backend on two ranks, DeepSpeed's own on four."""
DIVIDING = [
    (f"{name}:correct_gradients=true" if name in MULTIPLYING else name, ranks)
    for ranks in (2, 4)
    for name in SEQUENCE
]
"""Under the labels that must equal one process."""
ROTATED = ("cp:rotation=all-to-all,sequence=4", 4)
FEW = [("tp", 2), ("cp", 2), ("ulysses-zero2:correct_gradients=true", 2)]


@pytest.mark.parametrize(
    ("label", "ranks"), first(FEW, [*CUTTING, *DIVIDING, ROTATED, ("fsdp-cp:sequence=4", 4)])
)
def test_ranks_that_share_samples_train_as_one_process_does(
    label: str, ranks: int, reference: list[Trace], tmp_path: Path
) -> None:
    assert_trains("hardest", label, ranks, reference, tmp_path)


def assert_trains(cases: str, label: str, ranks: int, reference: list[Trace], folder: Path) -> None:
    """Against what one process trains in the same cases."""
    trained, expected = traces(label, ranks, folder, cases), reference[-len(CASES[cases]) :]
    compared = zip(expected, trained, CASES[cases], strict=True)
    assert [broken for parts in compared for broken in violations(*parts)] == []


@pytest.mark.costly
@pytest.mark.parametrize(
    ("label", "ranks"), first(FEW[:1], [*CUTTING, *(case for case in DIVIDING if case[1] == 2)])
)
def test_payload_of_recomputation_is_as_expected(label: str, ranks: int, tmp_path: Path) -> None:
    assert_derived(label, ranks, tmp_path, "recomputed, one architecture")
