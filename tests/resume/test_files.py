"""Neutral checkpoints of states and weights that lie in files (NVMe offload)."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.backends.libraries.extensions import ASYNC_IO
from harness.backends.zero.extension_builds import unmet_build
from tests.resume.engines import LENGTH, VOCABULARY, resume_job
from tests.resume.pairs import (
    Resumption,
    Side,
    is_exact,
    loss_difference,
    resume_all,
    save_all,
    trained,
    weight_difference,
)

UNMET = unmet_build(ASYNC_IO)
pytestmark = [
    pytest.mark.exhaustive, pytest.mark.long(seconds=100),
    pytest.mark.skipif(bool(UNMET), reason=" ".join(UNMET)),
]  # fmt: skip

MODEL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
}  # fmt: skip
"""On 2 ranks the pieces of the MLP's matrices take 1 MiB in fp32, those of attention half of that."""
STATES, ALL = Side("zero3:offload=nvme", 2), Side("zero3:offload=nvme-all", 2)
CUT = Side("zero3:offload=nvme-all,sub_group_size=300000", 2)
PLAIN = Side("zero3", 2)
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16-mixed": 2e-3}
"""Nats per token, as between other strategies."""


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_they_go_on_exactly_and_under_other_strategies(precision: str, tmp_path: Path) -> None:
    job = resume_job(precision=precision, model={"config": MODEL})
    sides = [STATES, ALL, CUT, PLAIN]
    uninterrupted = trained(save_all(sides, job, tmp_path, native=False))
    same = [Resumption(side, side) for side in sides]
    crossed = [Resumption(*pair) for pair in ((PLAIN, ALL), (ALL, PLAIN), (STATES, CUT), (CUT, STATES))]
    left_out = Resumption(PLAIN, ALL, sabotage="stale files")
    resumed = trained(resume_all([*same, *crossed, left_out], job, tmp_path))
    assert [pair for pair in same if not is_exact(uninterrupted[pair.source], resumed[pair])] == []
    for pair in crossed:
        assert loss_difference(uninterrupted[pair.target], resumed[pair]) <= LOSS_TOLERANCE[precision]
    assert loss_difference(uninterrupted[ALL], resumed[left_out]) > 0.1
    assert weight_difference(uninterrupted[ALL], resumed[left_out]) > 1e-3


def test_deepspeeds_own_are_refused_by_name(tmp_path: Path) -> None:
    job = resume_job(model={"config": MODEL})
    (refused,) = save_all([ALL], job, tmp_path).values()
    assert "NVMe offload" in str(refused)
    assert "measure.checkpoint=neutral" in str(refused)
