"""Packed documents that are kept apart, under each strategy."""

import pytest

from tests.traps.matrix import padded_documents

from .parity import NATIVE, assert_parity


def settings(folder) -> list[str]:
    path = padded_documents(folder / "documents.jsonl")
    return [
        "data.source=jsonl", f"data.path={path}", "data.packed=true", "data.document_attention=within",
        "data.limit=40",
    ]  # fmt: skip


@pytest.mark.long(seconds=10)
def test_sharded_strategies_keep_documents_apart(matrix, tmp_path_factory) -> None:
    records = assert_parity(matrix, settings(tmp_path_factory.mktemp("documents")), ["zero1", "fsdp"])
    data = records["single"].data
    assert data.target_tokens < data.samples * 15


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_every_strategy_keeps_documents_apart(precision: str, matrix, tmp_path_factory) -> None:
    asked = settings(tmp_path_factory.mktemp("documents"))
    assert_parity(matrix, [*asked, f"training.precision={precision}", "loss.chunk_tokens=16"], NATIVE)
