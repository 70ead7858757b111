"""Where a pipeline cuts a model."""

from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from harness.backends.mesh import Mesh
from harness.backends.options import PipelineOptions
from harness.backends.pipeline.cut import Cut, why_not_cut, why_not_scheduled
from harness.backends.refusals import Unsupported

BLOCKS = tuple(f"model.layers.{index}" for index in range(5))


def test_blocks_are_divided_evenly_and_in_order() -> None:
    cut = Cut(ranks=2, stages=2, blocks=BLOCKS)
    assert cut.blocks_of(0) + cut.blocks_of(1) == BLOCKS
    assert {len(cut.blocks_of(stage)) for stage in range(2)} == {2, 3}


def test_what_is_outside_of_blocks_goes_to_the_ends() -> None:
    names = ["model.embed_tokens.weight", *(f"{block}.mlp.weight" for block in BLOCKS), "model.norm.weight"]
    stages = Cut(ranks=5, stages=5, blocks=BLOCKS).stage_by_name(names)
    assert stages["model.embed_tokens.weight"] == 0
    assert stages["model.norm.weight"] == 4
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
