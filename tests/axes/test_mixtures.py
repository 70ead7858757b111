"""Mixtures of experts of transformers, whose data decide which experts compute."""

import pytest

from tests.representatives import first

from .parity import assert_as_derived, assert_parity

SIZES = (
    "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, "
    "max_position_embeddings: 16, num_experts_per_tok: 2"
)
MIXTRAL = f"model.config={{model_type: mixtral, intermediate_size: 48, num_local_experts: 4, {SIZES}}}"
QWEN = (
    "model.config={model_type: qwen3_moe, intermediate_size: 48, moe_intermediate_size: 24, num_experts: 4, "
    f"{SIZES}}}"
)
LEAVES = "zero3:leaf_module=blocks"
FEW = ("zero3", "fsdp")
WIDE = (*FEW, "ddp", "zero2", LEAVES)


@pytest.mark.parametrize(
    ("model", "labels"), first([(MIXTRAL, FEW)], [(MIXTRAL, FEW), (MIXTRAL, WIDE), (QWEN, WIDE)])
)
@pytest.mark.costly
def test_every_strategy_trains_a_mixture_as_one_process_does(
    model: str, labels: tuple[str, ...], matrix
) -> None:
    assert_parity(matrix, [model], labels)
    assert_as_derived(matrix, [model], [label for label in labels if label != LEAVES])
