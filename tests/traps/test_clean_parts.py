"""Where all ranks share their samples and nothing is wrong, no finding is raised.

The job has four blocks and four heads, so that four ranks can divide them. A module of its own, since all
tests of a module run in one process.
"""

from __future__ import annotations

from itertools import product

import pytest

from .clean import LABELS, PRECISIONS, assert_clean
from .matrix import Matrix

pytestmark = [pytest.mark.long(seconds=90), pytest.mark.exhaustive]

FOUR_BLOCKS = (
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 4, num_attention_heads: 4, "
    "num_key_value_heads: 4, max_position_embeddings: 16}"
)
PIPELINES = {
    2: ("pp", "pp:schedule=gpipe", "pp:schedule=interleaved"),
    4: ("pp", "pp:schedule=gpipe", "pp:schedule=interleaved,stages=2", "pp:micro_batches=8"),
}
DIVIDED = {
    2: (),
    4: (
        "tp", "cp:sequence=4", "fsdp-cp:sequence=4", "ulysses-zero3:sequence=4",
        *(f"{LABELS[f'ulysses-zero{stage}']},sequence=4" for stage in (1, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("world_size", "precision"), list(product(PIPELINES, PRECISIONS)))
def test_ranks_that_all_share_samples_have_no_finding(
    world_size: int, precision: str, matrix: Matrix, tally
) -> None:
    labels = (*PIPELINES[world_size], *DIVIDED[world_size])
    settings = (
        FOUR_BLOCKS, f"training.precision={precision}", "training.accumulation_steps=2",
        "training.global_batch_size=16",
    )  # fmt: skip
    assert_clean(labels, world_size, settings, matrix, tally)
