"""Files, buffers and memory of runs under NVMe offload are their closed forms to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.backends.libraries.extensions import ASYNC_IO
from harness.backends.zero.extension_builds import unmet_build
from harness.forms.terms import STATE_KINDS
from harness.judge.quantities.model_states import rank_states
from tests.memory.runs import compare

UNMET = unmet_build(ASYNC_IO)
pytestmark = [
    pytest.mark.exhaustive, pytest.mark.long(seconds=100),
    pytest.mark.skipif(bool(UNMET), reason=" ".join(UNMET)),
]  # fmt: skip

EVEN = (
    "{hidden_size: 512, intermediate_size: 2048, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 4, tie_word_embeddings: true}"
)
ODD = EVEN.replace("512", "520").replace("2048", "2051")
"""Pieces that are no multiple of the alignment, and padded."""
WAYS = {
    EVEN: ("zero3:offload=nvme", "zero3:offload=nvme-all", "zero3:offload=nvme-all,sub_group_size=500000"),
    ODD: (
        "zero3:offload=nvme,sub_group_size=1",
        "zero3:buffer_count=2,buffer_size=800001,offload=nvme-all,sub_group_size=1",
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("model", WAYS, ids=["even", "odd"])
def test_every_byte_has_its_term_and_training_is_the_same(model: str, precision: str, tmp_path: Path) -> None:
    settings = (
        f"model.config={model}", f"training.precision={precision}", "measure.probed_steps=2",
        "compare.noise_runs=true",
    )  # fmt: skip
    outcome = compare(tmp_path, ",".join(("single", *WAYS[model])), 2, *settings)
    ran = {label: record for label, record in outcome.records.items() if label.startswith("zero3")}
    assert len(ran) == len(WAYS[model])
    differences = {}
    for label, record in ran.items():
        held = rank_states(record)
        assert len(held) == 2, record.reasons
        for states in held:
            assert states.expected is not None
            assert states.file_bytes
            expected = states.expected.kinds() | {"files": states.expected.file_bytes}
            measured = states.measured | {"files": states.file_bytes}
            for kind in (*STATE_KINDS, "gathered", "communication", "buffers", "files"):
                if measured.get(kind, 0) != expected.get(kind, 0):
                    differences[label, states.rank, kind] = measured.get(kind), expected.get(kind)
    assert differences == {}
    parities = {row["backend"]: row["parity"] for row in outcome.document["rows"]}
    wanted = {"exact", "tight"} if precision == "fp32" else {"exact", "tight", "band"}
    assert {parities[label] for label in ran} <= wanted
    wrong = ("memory", "communication", "parity", "initial-weights", "weights")
    assert [f["id"] for f in outcome.document["findings"] if f["id"].startswith(wrong)] == []
