import pytest

from harness.backends import registry
from harness.job.config import load_experiment
from harness.plan.search import distinct_backends, variants
from tests.harness.plan.invented import JOB


def labels(name: str, gpus: int, gpus_per_node: int = 8) -> list[str]:
    return list(variants(registry.BUILT_IN[name], gpus, gpus_per_node, JOB))


def test_every_built_in_backend_is_looked_at_or_named_with_the_reason() -> None:
    chosen, left_out = distinct_backends()
    names = {entry.name for entry in chosen}
    assert names | left_out.keys() == registry.BUILT_IN.keys()
    assert names.isdisjoint(left_out)
    assert left_out["zero0"] == left_out["fsdp1-no-shard"] == "shards like ddp"
    assert left_out["fsdp1"] == "shards like fsdp"
    assert left_out["accelerate-zero3"] == "the same strategy through Accelerate"
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp-hybrid"} <= names


def test_offload_is_tried_where_it_differs() -> None:
    assert labels("ddp", 8) == ["ddp"]
    assert labels("zero2", 8) == ["zero2", "zero2:adam=deepspeed,offload=optimizer"]
    own = "zero3:adam=deepspeed,offload"
    assert labels("zero3", 8) == ["zero3", f"{own}=optimizer", f"{own}=cpu"]
    sgd = load_experiment(None, ["optimizer.kind=sgd"]).job()
    assert list(variants(registry.BUILT_IN["zero2"], 8, 8, sgd)) == ["zero2", "zero2:offload=optimizer"]
    assert labels("fsdp", 8) == ["fsdp", "fsdp:offload=cpu"]


def test_a_second_copy_within_a_node_is_tried_on_several_nodes() -> None:
    assert labels("zero3", 16)[-1] == "zero3:hpz=8"
    assert labels("fsdp", 16)[-1] == "fsdp:reshard=8"
    assert labels("fsdp", 12)[-1] == "fsdp:offload=cpu"
    for name in ("ulysses-zero3", "fsdp-tp", "fsdp-cp", "autotp-zero3"):
        assert not [label for label in labels(name, 16) if "hpz" in label or "reshard" in label]


@pytest.mark.parametrize(
    ("gpus", "sizes"), [(64, [8, 16, 32]), (16, [8]), (8, [4]), (24, [8]), (4, [2]), (2, []), (1, [])]
)
def test_shard_groups_are_nodes_with_at_least_two_replicas(gpus: int, sizes: list[int]) -> None:
    found = variants(registry.BUILT_IN["fsdp-hybrid"], gpus, min(gpus, 8), JOB)
    options = [registry.parse(label)[1] for label in found]
    without_offload = [o for o in options if getattr(o, "offload", None) == "none"]
    assert [getattr(o, "shard_size", None) for o in without_offload] == sizes


def test_degrees_are_powers_of_two_within_a_node() -> None:
    assert labels("tp", 64) == ["tp:tensor=2", "tp:tensor=4", "tp:tensor=8"]
    assert labels("tp", 6, 6) == ["tp:tensor=2"]
    assert labels("fsdp-cp", 16, 4)[:2] == ["fsdp-cp:sequence=2", "fsdp-cp:sequence=4"]
    assert labels("fsdp", 64) == ["fsdp", "fsdp:offload=cpu", "fsdp:reshard=8"]


def test_pipelines_have_few_and_many_micro_batches_and_stages_in_turn() -> None:
    assert labels("pp", 2) == [
        "pp:micro_batches=2,stages=2",
        "pp:micro_batches=8,stages=2",
        "pp:micro_batches=2,schedule=interleaved,stages=2",
    ]
