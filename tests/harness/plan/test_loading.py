"""How ranks load initial weights, and what a node's host holds meanwhile."""

from dataclasses import replace
from typing import Any

import pytest

from harness.backends import registry
from harness.backends.model_source import AskedLoading, Loading
from harness.job.job import Job
from harness.plan.prediction import loading_bytes
from harness.plan.scenario import Scenario
from tests.harness.plan.plans import llama, scenario

WHOLE = 4 * llama().parameters
LOADINGS: tuple[AskedLoading, ...] = ("slices", "full")


def planned(label: str, loading: AskedLoading = "slices", *, ranks: int = 8, **changes: Any) -> Scenario:
    """In fp32, on GPUs; a label may have options."""
    name, options = registry.parse(label)
    values: dict[str, Any] = {"precision": "fp32", "options": options.model_dump(mode="json")} | changes
    return scenario(name.name, ranks, loading=loading, **values)


@pytest.mark.parametrize(
    ("label", "slices"),
    [
        *((label, "slices") for label in (
            "fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp1", "fsdp1-hybrid-grad-op", "zero3",
            "zero3:offload=cpu", "fsdp:offload=cpu", "ulysses-zero3", "fsdp-cp", "tp", "fsdp-tp", "pp",
        )),
        *((label, "full") for label in (
            "single", "ddp", "cp", "zero0", "zero1", "zero2:offload=optimizer", "fsdp1-no-shard",
            "ulysses-zero2", "autotp-zero3", "accelerate-ddp", "accelerate-zero3", "accelerate-fsdp",
            "trainer-fsdp1", "trainer-zero3",
        )),
        ("accelerate-fsdp:cpu_ram_efficient_loading=true", "broadcast"),
        ("trainer-fsdp1:cpu_ram_efficient_loading=true", "broadcast"),
    ],
)  # fmt: skip
def test_which_ranks_build_the_whole_model(label: str, slices: Loading) -> None:
    strategy = registry.parse(label)[0].strategy
    assert strategy is not None
    efficient = "efficient" in label
    found = [strategy.loading(asked, ranks=8, efficient=efficient) for asked in LOADINGS]
    assert found == [slices, "broadcast" if efficient else "full"]
    if label in ("fsdp1", "fsdp"):  # whose single rank shards nothing under FSDP1
        assert strategy.loading("slices", ranks=1) == ("full" if label == "fsdp1" else "slices")


@pytest.mark.parametrize(
    ("job", "whole_because", "slices"),
    [
        ({}, None, "slices"),
        ({"model": {"factory": "own:build"}}, None, "slices"),
        ({"model": {"factory": "own:build"}}, "it cannot be built without memory", "full"),
        ({"adapter": {"kind": "lora", "base_dtype": "nf4", "targets": ["q_proj"]}}, None, "full"),
        ({"adapter": {"kind": "lora", "base_dtype": "bf16", "targets": ["q_proj"]}}, None, "slices"),
        ({"model": {"name": "somewhere"}}, None, "slices"),
    ],
)
def test_some_jobs_have_every_rank_build_the_whole_model(
    job: dict[str, Any], whole_because: str | None, slices: Loading
) -> None:
    plan = replace(
        planned("fsdp"), job=Job.model_validate(job), model=replace(llama(), whole_because=whole_because)
    )
    found = [loading_bytes(replace(plan, loading=asked)) == 8 * WHOLE for asked in LOADINGS]
    assert found == [slices == "full", True]


OWN = {"model": {"factory": "own:build"}}
CPU = {"torch_device": "cpu"}


@pytest.mark.parametrize(
    ("label", "ranks", "changes", "held"),
    [
        # Every rank of a node builds the whole model,
        *((label, 64, {}, 8 * WHOLE) for label in ("ddp", "zero2", "accelerate-zero3")),
        *((label, 2, {}, 2 * WHOLE) for label in ("ddp", "zero2", "accelerate-zero3")),
        # or its shard, on the CPU or where weights are offloaded,
        *((label, 8, {}, 0) for label in ("fsdp", "fsdp1", "zero3", "tp", "pp", "zero3:offload=optimizer")),
        *((label, 8, CPU, float(WHOLE)) for label in ("fsdp", "zero3")),
        ("fsdp-hybrid:shard_size=2", 8, CPU | {"shard_size": 2}, 8 * WHOLE / 2),
        *((f"{label}:offload=cpu", 8, {}, float(WHOLE)) for label in ("fsdp", "zero3")),
        # A model of one's own is built once on a node, if it can be without memory.
        ("fsdp", 64, {"job": Job.model_validate(OWN)}, WHOLE),
        ("fsdp", 64, {"job": Job.model_validate(OWN), "model": replace(llama(), whole_because="it is odd")},
         8 * WHOLE),
        ("accelerate-fsdp:cpu_ram_efficient_loading=true", 64, {}, WHOLE),
    ],
)  # fmt: skip
def test_the_host_of_a_node_holds(label: str, ranks: int, changes: dict[str, Any], held: float) -> None:
    made = {name: value for name, value in changes.items() if name != "job"}
    plan = replace(planned(label, ranks=ranks, **made), **{k: v for k, v in changes.items() if k == "job"})
    assert loading_bytes(plan) == pytest.approx(held, rel=0 if isinstance(held, int) else 1e-3)
