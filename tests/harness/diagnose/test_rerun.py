"""What this machine can run again, and how."""

import pytest

from harness.diagnose.rerun import label_on_one_machine, reference_labels, require_room
from harness.errors import HarnessError
from harness.record import DimensionPart, Record
from tests.records import make_record


def placed(label: str = "ddp", **world) -> Record:
    record = make_record(label=label)
    return record.model_copy(update={"world": record.world.model_copy(update=world)})


def test_a_few_ranks_of_several_nodes_have_room() -> None:
    require_room(placed(nodes=2, ranks_per_node=1))


def test_more_ranks_than_this_machine_takes() -> None:
    with pytest.raises(HarnessError) as error:
        require_room(placed(nodes=512, ranks_per_node=8, world_size=4096))
    assert "had 4096 ranks of 512 nodes and this machine takes" in str(error.value)
    assert "harness compare --nproc" in str(error.value)


def test_runs_on_gpus_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(HarnessError, match="takes 0 GPUs: diagnose on a machine with GPUs"):
        require_room(placed(device="cuda"))


def test_hybrid_sharding_keeps_the_shard_groups_of_its_nodes() -> None:
    assert label_on_one_machine(placed("fsdp-hybrid", nodes=4, ranks_per_node=2, world_size=8)) == (
        "fsdp-hybrid:shard_size=2"
    )
    assert label_on_one_machine(placed("fsdp-hybrid:shard_size=4", nodes=2)) == "fsdp-hybrid:shard_size=4"
    assert label_on_one_machine(placed("fsdp-hybrid")) == "fsdp-hybrid"


def test_noise_needs_another_split_and_at_low_precision_other_precisions() -> None:
    assert reference_labels(None, [placed()]) == [
        "single",
        "single:micro_batch_size=4,norm=fp32,backward=reordered",
    ]
    one = placed(micro_batch_size=1, accumulation_steps=1, world_size=1)
    assert reference_labels(None, [one]) == [
        "single", "single:norm=fp32,backward=reordered", "single:precision=fp64",
    ]  # fmt: skip
    mixed = make_record(label="ddp", training={"precision": "bf16-mixed"})
    assert reference_labels(None, [mixed])[2:] == ["single:precision=fp32", "single:precision=cast"]


def test_noise_of_cut_layers_is_measured_beside_it_at_low_precision() -> None:
    mixed = {"training": {"precision": "bf16-mixed"}}
    record = make_record(label="tp", world_size=4, **mixed)
    dimensions = [DimensionPart(name="data", size=2), DimensionPart(name="tensor", size=2)]
    cut = record.model_copy(update={"world": record.world.model_copy(update={"dimensions": dimensions})})
    assert reference_labels(None, [make_record(**mixed), cut])[4:] == ["single:partial_sums=2"]
