"""Backends whose ranks divide samples: they train as one process does, and hold and send what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.judge.quantities import volume_differences, volume_of
from tests.built_in import MULTIPLYING, SEQUENCE
from tests.contract.cases import CASES, HARDEST, Trace
from tests.contract.communication import RECOMPUTED_CASES, VOLUME_CASES
from tests.contract.ranks import on_ranks
from tests.contract.states import LLAMA_CASES
from tests.contract.test_communication import as_record
from tests.contract.test_states import assert_closed_forms
from tests.contract.test_tensor import assert_trains

EXHAUSTIVE = pytest.mark.exhaustive


def label_of(name: str, **options: object) -> str:
    """The label under which a backend must equal one process."""
    corrected = {"correct_gradients": "true"} if name in MULTIPLYING else {}
    text = ",".join(f"{key}={value}" for key, value in (corrected | options).items())
    return f"{name}:{text}" if text else name


@pytest.mark.parametrize(
    ("label", "ranks"),
    [
        ("cp", 2),
        ("ulysses-zero2:correct_gradients=true", 2),
        *(pytest.param(label_of(name), 2, marks=EXHAUSTIVE) for name in SEQUENCE),
        *(pytest.param(label_of(name), 4, marks=EXHAUSTIVE) for name in SEQUENCE),
        pytest.param("cp:rotation=all-to-all,sequence=4", 4, marks=EXHAUSTIVE),
        pytest.param("fsdp-cp:sequence=4", 4, marks=EXHAUSTIVE),
    ],
)
def test_ranks_that_divide_samples_train_as_one_process_does(
    label: str, ranks: int, reference: list[Trace], tmp_path: Path
) -> None:
    assert_trains(HARDEST, "hardest", label, ranks, reference[-len(HARDEST) :], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SEQUENCE)
def test_ranks_that_divide_samples_train_as_one_process_does_in_every_case(
    name: str, reference: list[Trace], tmp_path: Path
) -> None:
    assert_trains(CASES, "cases", label_of(name), 2, reference, tmp_path)


@EXHAUSTIVE  # The clean matrix (tests/traps/test_clean.py) has bytes and states of every backend in one case.
@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        *((name, {}, ranks) for name in SEQUENCE for ranks in (2, 4)),
        ("cp", {"rotation": "all-to-all", "sequence": 4}, 4),
    ],
)
def test_payload_is_as_expected_to_the_byte(
    name: str, options: dict[str, object], ranks: int, tmp_path: Path
) -> None:
    label = label_of(name, **options)
    per_rank = on_ranks("volumes", label, ranks, tmp_path)
    for case, parts in zip(VOLUME_CASES, zip(*per_rank, strict=True), strict=True):
        record = as_record(name, case, list(parts), label)
        pair = volume_of(record)
        assert pair is not None
        assert pair[1].unknown is None, case
        assert {row.op for row in record.comm} & {"all_to_all", "permute"}, case
        assert volume_differences(record) == [], case


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SEQUENCE)
def test_payload_of_recomputation_is_as_expected(name: str, tmp_path: Path) -> None:
    label = label_of(name)
    per_rank = on_ranks("tests.contract.communication:count_recomputed_llama", label, 2, tmp_path)
    cases = [case for case in RECOMPUTED_CASES if case.family == "llama"]
    for case, parts in zip(cases, zip(*per_rank, strict=True), strict=True):
        assert volume_differences(as_record(name, case, list(parts), label)) == [], case


@EXHAUSTIVE
@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name in SEQUENCE for ranks in (2, 4)])
def test_states_are_the_closed_form_to_the_byte(name: str, ranks: int, tmp_path: Path) -> None:
    assert_closed_forms(label_of(name), ranks, tmp_path, "states_of_llama", LLAMA_CASES)
