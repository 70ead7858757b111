"""What must hold of a job under an axis: every strategy trains it as its own reference does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.judge.quantities import RankStates, rank_states, volume_differences, why_unknown
from harness.launch.cells import canonical_label
from harness.record import Record
from tests import kept
from tests.traps.matrix import Matrix, padded_documents

NATIVE = ("ddp", "zero1", "zero3", "fsdp", "fsdp1")
LARGE = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 16, vocab_size: 4096, tie_word_embeddings: %s}"
)
"""Whose logits are most of its memory."""
CHUNK = 8


def packed(folder: Path) -> list[str]:
    """A job of packed documents that are kept apart; who shares the folder shares its runs."""
    folder.mkdir(exist_ok=True)
    path = padded_documents(folder / "documents.jsonl")
    return [
        "data.source=jsonl", f"data.path={path}", "data.packed=true", "data.document_attention=within",
        "data.limit=40",
    ]  # fmt: skip


def together() -> list[str]:
    """One job under several axes, whose modules each read its runs; the last setting: chunks of the loss."""
    given = [LARGE % "false", "training.activation_checkpointing=every-2", *packed(kept.KEPT)]
    return [*given, f"loss.chunk_tokens={CHUNK}"]


def assert_parity(
    matrix: Matrix, settings: Sequence[str], labels: Sequence[str] = NATIVE, world_size: int = 2
) -> dict[str, Record]:
    """Run the job under each of them; none may raise a finding. Return the records by canonical label."""
    found = [(f.id, f.message) for f in matrix.findings(labels, world_size, settings)]
    assert found == [], found
    rows = matrix.compare(labels, world_size, settings).rows
    assert {row.record.backend.label for row in rows} == {"single", *map(canonical_label, labels)}
    levels = {row.record.backend.label: row.judgement.parity for row in rows}
    low = any(word in setting for setting in settings for word in ("bf16", "8bit", "fp8"))
    assert set(levels.values()) <= {"exact", "tight", *(["band"] if low else [])}, levels
    return {row.record.backend.label: row.record for row in rows}


def assert_as_derived(
    matrix: Matrix, settings: Sequence[str], labels: Sequence[str]
) -> dict[str, RankStates]:
    """States and traffic of two ranks are the closed forms', to the byte. Return the states of rank 0."""
    found = {}
    for label in labels:
        record = matrix.record(label, 2, settings)
        of_ranks = rank_states(record)
        for states in of_ranks:
            assert states.expected is not None
            assert states.measured_bytes == states.expected.model_state_bytes, (label, states.rank)
        assert (why_unknown(record), volume_differences(record)) == (None, []), label
        found[label] = of_ranks[0]
    return found
