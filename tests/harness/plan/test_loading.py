"""How ranks load initial weights, and what a node's host holds meanwhile."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.loading import GEOMETRIES
from harness.backends import registry
from harness.backends.model_source import AskedLoading, Loading
from harness.job.job import Job
from harness.plan.models import from_config
from harness.plan.prediction import loading_bytes, loading_of, whole_bytes
from harness.plan.scenario import Scenario
from tests.harness.plan.plans import llama, scenario

WHOLE = 4 * llama().parameters
EMBEDDING = 32000 * 4096
BLOCK = 4 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096)
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
    full = "broadcast" if "efficient" in label else "full"
    assert [loading_of(planned(label, asked)) for asked in LOADINGS] == [slices, full]
    if label in ("fsdp1", "fsdp"):  # whose single rank shards nothing under FSDP1
        assert loading_of(planned(label, ranks=1)) == ("full" if label == "fsdp1" else "slices")


@pytest.mark.parametrize(
    ("job", "whole_because", "slices"),
    [
        ({}, None, "slices"),
        ({"model": {"factory": "own:build"}}, None, "slices"),
        ({"model": {"factory": "own:build"}}, "it cannot be built without memory", "full"),
        ({"adapter": {"kind": "lora", "base_dtype": "nf4"}}, None, "full"),
        ({"adapter": {"kind": "lora", "base_dtype": "bf16"}}, None, "slices"),
        ({"model": {"name": "somewhere"}}, None, "slices"),
    ],
)
def test_some_jobs_have_every_rank_build_the_whole_model(
    job: dict[str, Any], whole_because: str | None, slices: Loading
) -> None:
    plan = replace(
        planned("fsdp"), job=Job.model_validate(job), model=replace(llama(), whole_because=whole_because)
    )
    found = [loading_of(replace(plan, loading=asked)) for asked in LOADINGS]
    assert found == [slices, "full"]


OWN, READ = {"model": {"factory": "own:build"}}, {"model": {"name": "somewhere"}}
CPU = {"torch_device": "cpu"}


@pytest.mark.parametrize(
    ("label", "ranks", "changes", "held"),
    [
        # Every rank of a node builds the whole model,
        *((label, 64, {}, 8 * WHOLE) for label in ("ddp", "zero2", "accelerate-zero3")),
        *((label, 2, {}, 2 * WHOLE) for label in ("ddp", "zero2", "accelerate-zero3")),
        # or holds one unit where it draws for its device,
        *((label, 8, {}, 8 * BLOCK) for label in ("fsdp", "fsdp1", "zero3", "tp", "pp")),
        *((label, 8, {"model": llama(vocabulary=256_000)}, 8 * 4 * 256_000 * 4096)
          for label in ("fsdp", "fsdp1", "zero3", "tp", "pp")),
        ("zero3:offload=optimizer", 8, {}, 8 * BLOCK),
        # with its shard on the CPU, or where weights are offloaded,
        *((label, 8, CPU, float(WHOLE + 8 * BLOCK)) for label in ("fsdp", "zero3")),
        ("fsdp-hybrid:shard_size=2", 8, CPU | {"shard_size": 2}, 8 * (WHOLE / 2 + BLOCK)),
        *((f"{label}:offload=cpu", 8, {}, float(WHOLE + 8 * BLOCK)) for label in ("fsdp", "zero3")),
        # or a piece of a file.
        ("fsdp", 8, {"job": Job.model_validate(READ)}, 8 * 2**22 * (4 + 4)),
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


def test_rounding_holds_the_largest_parameter_twice() -> None:
    assert whole_bytes(planned("ddp", precision="bf16-mixed")) == WHOLE + (2 + 4) * EMBEDDING


def test_a_tied_output_layer_is_there_until_it_is_tied() -> None:
    model = llama()
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    layout = replace(model.layout, parameters=model.layout.parameters[:-1], tied=tied)
    plan = planned("ddp", model=replace(model, layout=layout))
    assert whole_bytes(plan) == WHOLE
    read = replace(plan, job=Job.model_validate({"model": {"name": "somewhere"}}))
    assert whole_bytes(read) == WHOLE - 4 * EMBEDDING


@pytest.mark.parametrize(
    ("geometry", "precision", "loading", "ranks", "megabytes"),
    [
        ("bloom-560m", "fp32", "slices", 2, 2155), ("bloom-560m", "fp32", "slices", 4, 1595),
        ("bloom-560m", "fp32", "full", 2, 3266), ("llama-1.5b", "fp32", "slices", 2, 3280),
        ("llama-1.5b", "fp32", "slices", 4, 1774), ("llama-7b", "bf16", "slices", 4, 3969),
    ],
)  # fmt: skip
def test_published_measurements_of_fsdp_are_predicted(
    geometry: str, precision: str, loading: AskedLoading, ranks: int, megabytes: int
) -> None:
    """Peaks of CPU ranks in `docs/memory.md`; the whole model is that of the script."""
    config = GEOMETRIES[geometry]
    model = from_config(dict(config), name=geometry, source="test", given_whole=False)
    plan = planned("fsdp", loading, ranks=ranks, precision=precision, model=model, torch_device="cpu")
    assert loading_bytes(plan) / ranks == pytest.approx(megabytes * 1e6, rel=0.055)
