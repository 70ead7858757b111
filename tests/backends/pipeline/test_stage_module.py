"""Stages in a row compute what the whole model does, and hold each parameter once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harness.backends.base import Unsupported
from harness.backends.pipeline.cut import PIPELINED_MODELS, Cut
from harness.backends.pipeline.engine import (
    cut_stage,
    require_cuttable,
    stages_of_parameters,
)
from harness.rank.models.changes import chunk_head

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def model_of(kind: str, *, tied: bool) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", PIPELINED_MODELS)
def test_stages_in_a_row_are_the_model(kind: str, tied: bool) -> None:
    model = model_of(kind, tied=tied)
    cut = Cut(ranks=2, stages=4, blocks=require_cuttable(model))
    tokens = torch.randint(1, 64, (2, 24))
    values, held = tokens, 0
    for stage in range(cut.stages):
        part = cut_stage(model, cut, stage, dict(model.named_parameters()))
        values, held = part(values), held + sum(p.numel() for p in part.parameters())
    assert torch.equal(values, model(input_ids=tokens).logits)
    shared = model.lm_head.weight.numel() if tied else 0
    assert held == sum(p.numel() for p in model.parameters()) + shared


def test_a_head_that_computes_the_loss_is_left_to_the_loss() -> None:
    model = model_of("llama", tied=True)
    tokens = torch.randint(1, 64, (2, 24))
    logits = model(input_ids=tokens).logits
    chunk_head(model, 5)
    cut = Cut(ranks=2, stages=2, blocks=require_cuttable(model))
    values = tokens
    for stage in range(cut.stages):
        part = cut_stage(model, cut, stage, dict(model.named_parameters()))
        values = part(values)
    assert part.loss_head is not None
    assert torch.equal(part.loss_head(values), logits)


def test_a_tied_weight_lies_on_both_ends() -> None:
    model = model_of("llama", tied=True)
    stages = stages_of_parameters(model, Cut(ranks=2, stages=2, blocks=require_cuttable(model)))
    assert [name for name, holders in stages.items() if len(holders) > 1] == ["model.embed_tokens.weight"]


def test_a_model_that_scales_its_embedding_is_refused() -> None:
    """Gemma 2 multiplies what it is given as embedded, so a later stage would multiply hidden states."""
    with pytest.raises(Unsupported, match="Gemma2ForCausalLM"):
        require_cuttable(model_of("gemma2", tied=True))
