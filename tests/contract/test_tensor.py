"""Backends whose ranks cut layers: they train as one process does, and hold and send what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.judge.quantities import volume_differences, volume_of
from tests.contract.cases import CASES, HARDEST, Case, Trace
from tests.contract.communication import RECOMPUTED_CASES, VOLUME_CASES
from tests.contract.ranks import on_ranks, traces
from tests.contract.states import LLAMA_CASES
from tests.contract.test_communication import as_record
from tests.contract.test_contract import violations
from tests.contract.test_states import assert_closed_forms

MATRIX = [
    pytest.param("tp", 2),
    pytest.param("fsdp-tp", 4, marks=pytest.mark.exhaustive),
    pytest.param("fsdp-tp:sync_each_batch=true", 4, marks=pytest.mark.exhaustive),
    pytest.param("tp:tensor=2", 4, marks=pytest.mark.exhaustive),
    pytest.param("autotp-zero1", 2, marks=pytest.mark.exhaustive),
    pytest.param("autotp-zero3", 2, marks=pytest.mark.exhaustive),
    pytest.param("autotp-zero1", 4, marks=pytest.mark.exhaustive),
    pytest.param("autotp-zero2", 4, marks=pytest.mark.exhaustive),
    pytest.param("autotp-zero3", 4, marks=pytest.mark.exhaustive),
]
"""The clean matrix (tests/traps/test_clean.py) has every backend on two ranks, DeepSpeed's own on four."""


@pytest.mark.parametrize(("label", "ranks"), MATRIX)
def test_ranks_that_cut_layers_train_as_one_process_does(
    label: str, ranks: int, reference: list[Trace], tmp_path: Path
) -> None:
    assert_trains(HARDEST, "hardest", label, ranks, reference[-len(HARDEST) :], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("label", "ranks"), [case.values for case in MATRIX])
def test_ranks_that_cut_layers_train_as_one_process_does_in_every_case(
    label: str, ranks: int, reference: list[Trace], tmp_path: Path
) -> None:
    assert_trains(CASES, "cases", label, ranks, reference, tmp_path)


def assert_trains(
    cases: list[Case], which: str, label: str, ranks: int, reference: list[Trace], folder: Path
) -> None:
    """Against what one process trains in the same cases."""
    trained = traces(label, ranks, folder, which)
    found = []
    for case, expected, trace in zip(cases, reference, trained, strict=True):
        found += violations(expected, trace, case)
    assert found == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("label", "ranks"), MATRIX)
def test_payload_is_as_expected_to_the_byte(label: str, ranks: int, tmp_path: Path) -> None:
    per_rank = on_ranks("volumes", label, ranks, tmp_path)
    for case, parts in zip(VOLUME_CASES, zip(*per_rank, strict=True), strict=True):
        record = as_record(label.partition(":")[0], case, list(parts), label)
        pair = volume_of(record)
        assert pair is not None
        assert pair[1].unknown is None, case
        assert {row.role for row in record.comm} >= {"tensor"}, case
        assert volume_differences(record) == [], case


@pytest.mark.parametrize(("label", "ranks"), MATRIX)
@pytest.mark.costly
def test_payload_of_recomputation_is_as_expected(label: str, ranks: int, tmp_path: Path) -> None:
    per_rank = on_ranks("tests.contract.communication:count_recomputed_llama", label, ranks, tmp_path)
    cases = [case for case in RECOMPUTED_CASES if case.family == "llama"]
    for case, parts in zip(cases, zip(*per_rank, strict=True), strict=True):
        record = as_record(label.partition(":")[0], case, list(parts), label)
        assert volume_differences(record) == [], case


@pytest.mark.exhaustive
@pytest.mark.parametrize(("label", "ranks"), MATRIX)
def test_states_are_the_closed_form_to_the_byte(label: str, ranks: int, tmp_path: Path) -> None:
    assert_closed_forms(label, ranks, tmp_path, "states_of_llama", LLAMA_CASES)
