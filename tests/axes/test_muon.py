"""Muon under the strategies whose optimizer can have whole matrices."""

import pytest

from tests.representatives import first

from .parity import assert_parity

MUON = "optimizer.kind=muon"
ODD = (
    "model.config={hidden_size: 32, intermediate_size: 49, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16}"
)
"""Rows of some matrices that two ranks do not share evenly."""


def test_muon_trains_the_same_with_whole_matrices_and_with_rows(matrix) -> None:
    records = assert_parity(matrix, [MUON, ODD], ["ddp", "fsdp"])
    for record in records.values():
        assert record.backend.effective.optimizer == "harness.rank.models.optimizer.MuonAndAdamW"
        assert record.observed.matrices_in_parts == 0


@pytest.mark.parametrize("label", first(["fsdp"], ["ddp", "fsdp"]))
@pytest.mark.costly
def test_muon_in_bf16_lies_within_what_its_rounding_changes(label: str, matrix) -> None:
    assert_parity(matrix, [MUON, ODD, "optimizer.newton_schulz=bf16"], [label])


def test_rows_that_are_orthogonalised_by_themselves_are_named(matrix) -> None:
    found = {f.id: f for f in matrix.findings(["planted-OrthogonalisesRows"], 2, [MUON, ODD])}
    assert next(iter(found)) == "muon-on-parts"
    assert "no optimizer keeps the complete momentum of 14 matrices" in found["muon-on-parts"].text
    assert set(found) <= {"muon-on-parts", "diverged", "update-differs"}


@pytest.mark.parametrize("label", ["zero1", "fsdp1"])
def test_flat_parameters_are_unsupported_by_reason(label: str, matrix) -> None:
    record = matrix.record(label, 2, [MUON])
    assert record.status == "unsupported"
    assert "muon needs whole matrices" in record.reasons[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_every_strategy_with_whole_matrices_trains_with_muon(precision: str, matrix) -> None:
    labels = ["ddp", "fsdp", "fsdp-grad-op", "fsdp:offload=cpu", "fsdp-hybrid:shard_size=2", "accelerate-ddp"]
    assert_parity(matrix, [MUON, ODD, f"training.precision={precision}"], labels, world_size=4)
