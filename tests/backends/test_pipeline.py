"""Where a pipeline cuts a model; stages in a row compute what the whole model does."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harness.backends.mesh import Mesh
from harness.backends.options import PipelineOptions
from harness.backends.pipeline.cut import PIPELINED_MODELS, Cut, why_not_cut, why_not_scheduled
from harness.backends.pipeline.engine import (
    cut_stage,
    require_cuttable,
    stages_of_parameters,
)
from harness.backends.refusals import Unsupported
from harness.rank.models.changes import chunk_head

BLOCKS = tuple(f"model.layers.{index}" for index in range(5))


def test_blocks_are_divided_evenly_and_in_order() -> None:
    cut = Cut(ranks=2, stages=2, blocks=BLOCKS)
    assert cut.blocks_of(0) + cut.blocks_of(1) == BLOCKS
    assert {len(cut.blocks_of(stage)) for stage in range(2)} == {2, 3}


def test_what_is_outside_of_blocks_goes_to_the_ends() -> None:
    names = ["model.embed_tokens.weight", *(f"{block}.mlp.weight" for block in BLOCKS), "model.norm.weight"]
    stages = Cut(ranks=5, stages=5, blocks=BLOCKS).stage_by_name(names)
    assert (stages["model.embed_tokens.weight"], stages["model.norm.weight"]) == (0, 4)
    assert [stages[f"{block}.mlp.weight"] for block in BLOCKS] == [0, 1, 2, 3, 4]


def test_block_1_is_not_taken_for_block_10() -> None:
    blocks = tuple(f"layers.{index}" for index in range(12))
    stages = Cut(ranks=12, stages=12, blocks=blocks).stage_by_name(["layers.1.weight", "layers.10.weight"])
    assert stages == {"layers.1.weight": 1, "layers.10.weight": 10}


def test_interleaved_stages_go_round_the_ranks() -> None:
    cut = Cut(ranks=2, stages=4, blocks=BLOCKS)
    assert [cut.of_rank(rank) for rank in range(2)] == [(0, 2), (1, 3)]


def test_more_stages_than_blocks_are_refused() -> None:
    assert why_not_cut(blocks=4, ranks=2, stages=4) is None
    reason = why_not_cut(blocks=3, ranks=2, stages=4)
    assert reason is not None
    assert "4 stages need at least 4 blocks, the model has 3" in reason


def test_ranks_beside_the_pipeline_are_data_parallel() -> None:
    assert PipelineOptions().mesh(4) == Mesh((("pipeline", 4), ("data", 1)))
    mesh = PipelineOptions(stages=2).mesh(4)
    assert mesh.data_size == 2
    assert mesh.group("pipeline", 1) == [1, 3]
    with pytest.raises(Unsupported, match="does not fit 4 ranks"):
        PipelineOptions(stages=3).mesh(4)
    with pytest.raises(Unsupported, match="at least 2 ranks"):
        PipelineOptions().mesh(1)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_torch_does_not_schedule_is_known_before(schedule: str, ranks: int) -> None:
    stages = [
        MagicMock(group_size=ranks, group_rank=0, num_stages=2 * ranks, stage_index=i) for i in (0, ranks)
    ]
    single = MagicMock(num_stages=ranks, group_rank=0)
    refused = set()
    for count in range(1, 12):
        try:
            if schedule == "interleaved":
                ScheduleInterleaved1F1B(stages, count)
            else:
                (Schedule1F1B if schedule == "1f1b" else ScheduleGPipe)(single, count)
        except ValueError:
            refused.add(count)
    known = {n for n in range(1, 12) if why_not_scheduled(schedule, micro_batches=n, ranks=ranks) is not None}
    assert known == refused
    assert bool(refused) == (schedule != "gpipe")


def test_what_is_not_scheduled_says_what_would_be() -> None:
    few, uneven = (
        why_not_scheduled(schedule, micro_batches=count, ranks=2)
        for schedule, count in (("1f1b", 1), ("interleaved", 5))
    )
    assert "1F1B over 2 stages needs at least 2 micro-batches" in str(few)
    assert "choose a multiple of 2" in str(uneven)


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
