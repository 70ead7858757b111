"""What an estimate can be asked, and what a number of ranks cannot do."""

from typing import Any

import pytest

from harness.backends.registry import BUILT_IN
from harness.errors import HarnessError
from harness.plan.answer import candidates
from harness.plan.prediction import Prediction
from tests.harness.plan.asking import ask


def rows(*assignments: str, **asked: Any) -> list[Prediction]:
    return list(candidates(ask(*assignments, **asked)))


def row(*assignments: str, **asked: Any) -> Prediction:
    (found,) = rows(*assignments, **asked)
    return found


def test_all_means_every_built_in_backend_but_the_reference() -> None:
    assert ask(backends="all").labels == tuple(name for name in BUILT_IN if name != "single")


def test_a_pipeline_that_nobody_described_has_no_more_stages_than_blocks() -> None:
    """Of 126 blocks; 16 stages are the most that `harness recommend` tries too."""
    asked = {"model": "llama-3.1-405b", "backends": "all", "gpu": "H100-80", "fabric": "NDR400"}
    labels = {r.label for r in rows("training.micro_batch_size=16", world_sizes=(4096,), **asked)}
    assert {label for label in labels if label.startswith("pp")} == {"pp:stages=16"}
    (named,) = rows("training.micro_batch_size=4096", world_sizes=(4096,), **(asked | {"backends": "pp"}))
    assert named.unsupported == (
        "4096 stages need at least 4096 blocks, the model has 126; choose fewer stages"
    )


def test_one_process_is_asked_of_one_gpu_alone() -> None:
    labels = [(r.world_size, r.label) for r in rows(backends="all", world_sizes=(1, 2))]
    assert (1, "single") in labels
    assert (2, "single") not in labels


def test_with_accumulation_alone_the_micro_batch_is_one() -> None:
    asked = ask("training.accumulation_steps=64")
    assert "training.micro_batch_size=1, since none is given" in asked.remarks
    (found,) = candidates(asked)
    assert found.scenario is not None
    assert (found.scenario.micro_batch_size, found.scenario.accumulation_steps) == (1, 64)
    assert found.scenario.job.training.global_batch_size == 8 * 64


def test_without_a_batch_the_micro_batch_is_one() -> None:
    scenario = row(world_sizes=(64,)).scenario
    assert scenario is not None
    assert (scenario.micro_batch_size, scenario.accumulation_steps) == (1, 1)


def test_a_global_batch_is_cut_for_each_number_of_ranks() -> None:
    found = rows("training.global_batch_size=64", "training.micro_batch_size=2", world_sizes=(8, 16))
    assert [r.scenario.accumulation_steps for r in found if r.scenario] == [4, 2]


def test_an_option_is_part_of_the_label() -> None:
    assert ask(backends="zero3:offload=cpu").labels == ("zero3:offload=cpu",)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"backends": "zero4"}, r"backend 'zero4' is unknown\. .*Did you mean 'zero"),
        ({"world_sizes": (12,)}, r"12 ranks do not fill nodes of 8 GPUs"),
    ],
)
def test_a_wrong_question_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        ask(**asked)  # type: ignore[arg-type]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(HarnessError, match="leaves no whole micro_batch_size"):
        ask("training.global_batch_size=12", world_sizes=(8,))


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(HarnessError, match=r"2048 is longer than gpt2's context of 1024 positions"):
        ask("data.sequence_length=2048", model="gpt2")


@pytest.mark.parametrize(
    ("backend", "settings", "reason"),
    [
        ("single", (), "one process only, not 8"),
        ("fsdp-hybrid:shard_size=3", (), "shard_size 3 does not divide the world size 8"),
        ("zero3:hpz=3", (), "hpz 3 does not divide the world size 8"),
        ("ulysses-zero3:hpz=2", (), "only where every rank has samples of its own"),
        ("fsdp:reshard=8", (), "reshard needs at least 2 groups of at least 2 ranks"),
        ("fsdp1-hybrid:shard_size=8", (), "hybrid sharding needs at least 2 replicas"),
        ("zero0", ("training.precision=bf16",), "fp32 masters at stage 0"),
        ("zero0:offload=optimizer", (), "stage 0 has nothing to offload"),
        ("zero2:offload=optimizer", ("training.precision=bf16",), "only if it is its own"),
        ("zero2:adam=deepspeed", (), "needs offload=optimizer or cpu"),
        ("fsdp:offload=cpu", ("training.precision=fp16-mixed",), "gradient scaler"),
        ("accelerate-fsdp", ("runtime.device=cpu",), "ignores an FSDP plugin"),
        ("fsdp1:offload=cpu", ("runtime.device=cpu",), "needs an accelerator"),
        ("fsdp1:offload=cpu,sync_each_batch=true", (), "cannot add the gradient of a micro-step"),
    ],
)
def test_what_a_strategy_cannot_do_stands_in_its_row(
    backend: str, settings: tuple[str, ...], reason: str
) -> None:
    found = row(*settings, backends=backend)
    assert reason in (found.unsupported or "")
    assert found.scenario is None


def test_hybrid_shards_within_a_node_unless_told_otherwise() -> None:
    of_nodes, told = rows(backends="fsdp-hybrid fsdp-hybrid:shard_size=2", world_sizes=(16,), per_node=8)
    assert of_nodes.scenario is not None
    assert told.scenario is not None
    assert (of_nodes.scenario.shard_size, told.scenario.shard_size) == (8, 2)


def test_muon_is_planned_where_it_runs() -> None:
    found = {
        r.label: r for r in rows("optimizer.kind=muon", backends="ddp fsdp zero1 fsdp1", world_sizes=(8,))
    }
    assert [label for label, r in found.items() if r.scenario] == ["ddp", "fsdp"]
    assert "flat partitions" in (found["zero1"].unsupported or "")
    terms = {t.name: t.bytes for t in found["ddp"].scenario.states.terms if t.kind == "optimizer"}
    assert terms["Muon's momentum"] > 0
    assert "Adam's moments" in terms
