"""What answers say of their own error comes from published runs, which are predicted here again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import benchmarks.published
from benchmarks.published.judge import errors_of, judge
from benchmarks.published.mapping import Mapped, map_row
from benchmarks.published.rows import read_rows
from harness.job.job import Job
from harness.plan.hardware import default_constants
from harness.plan.profiles import missing_profiles, trace_ahead
from harness.plan.trust import CPU, CPU_ERRORS, measured_errors, trust_in
from tests.harness.plan.plans import scenario

RUNS = Path(benchmarks.published.__file__).with_name("published_runs.csv")
FIGURES = ("memory", "speed")


def job(**sections: dict[str, str]) -> Job:
    return Job.model_validate({"data": {"sequence_length": 4096}, **sections})


def published(kind: str) -> list[dict[str, Any]]:
    """Runs of others under a kind of strategy."""
    return [run for run in measured_errors() if run["kind"] == kind and run["statistic"] != CPU]


def again(mapped: list[Mapped]) -> None:
    found = {one["run"]: one for one in errors_of(map(judge, mapped))}
    kept = {str(one["run"]): one for one in measured_errors()}
    for name, one in found.items():
        for figure in FIGURES:
            if one[figure] is not None:
                assert one[figure] == pytest.approx(kept[name][figure], abs=0.0011), (name, figure)


def test_every_tenth_run_without_tracing_has_the_kept_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the profiles that ship, whatever was traced here
    mapped = [map_row(row) for row in read_rows(RUNS)[::10]]
    asked = [one for one in mapped if one.memory_scenario is not None]
    shipped = [one for one in asked if not missing_profiles([one.memory_scenario])]  # type: ignore[list-item]
    speeds = [replace(one, memory_not_covered="needs a trace") for one in asked if one not in shipped]
    assert len(speeds) > 10
    again([*shipped, *speeds])


@pytest.mark.exhaustive
@pytest.mark.long(seconds=120)
def test_every_run_has_the_kept_error() -> None:
    mapped = [map_row(row) for row in read_rows(RUNS)]
    trace_ahead(missing_profiles(one.memory_scenario for one in mapped if one.memory_scenario))
    again(mapped)
    kept = {one["run"] for one in measured_errors() if one["statistic"] != CPU}
    assert kept == {one["run"] for one in errors_of(map(judge, mapped))}


def test_an_answer_says_how_wrong_runs_like_it_were() -> None:
    trust = trust_in(scenario("fsdp1", 8))
    alike = [run for run in published("fsdp1") if not run["adapted"]]
    length = scenario("fsdp1", 8).job.data.sequence_length
    speeds = [
        run["speed"] for run in alike
        if max(1024, length / 4) <= run["tokens"] <= 4 * length and run["speed"] is not None
        and not run["checkpointed"] and not run["compiled"]
    ]  # fmt: skip
    assert trust.speed.runs == len(speeds) >= 5
    assert trust.speed.unlike == ()
    first, second = trust.lines()
    assert first.startswith(
        "typical error, full training under fsdp1: allocated n/a without checkpointing, with it ±"
    )
    assert f"({len(speeds)} published runs" in first
    assert second == "largest assumption: training sustains 90 % of the best matmul rate of A100-80"


def test_runs_that_differ_are_counted_where_there_are_few_and_that_is_said() -> None:
    asked = scenario("fsdp", 8)
    assert not asked.job.training.activation_checkpointing
    trust = trust_in(asked)
    runs = [r for r in published("fsdp2") if r["statistic"] == "allocated" and not r["adapted"]]
    assert {r["checkpointed"] for r in runs if not r["compiled"]} == {True}
    assert trust.allocated.not_of == "without checkpointing"
    assert "allocated n/a without checkpointing, with it ±" in trust.lines()[0]


def test_two_runs_are_listed_rather_than_summed_up() -> None:
    offloaded = scenario("fsdp", 8, options={"offload": "cpu"}, activation_checkpointing=True)
    (run,) = (r for r in published("fsdp2+offload") if not r["adapted"] and r["memory"])
    said = trust_in(offloaded).lines()[0]
    size = f"{abs(run['memory']):.0%}".replace("%", " %")
    assert f"allocated {size} too {'low' if run['memory'] < 0 else 'high'} (1 published run" in said
    assert "allocated ±" not in said


def test_runs_with_links_of_another_kind_count_only_where_there_are_few() -> None:
    adapted = job(adapter={"kind": "lora", "base_dtype": "nf4"})
    training = adapted.training.model_copy(update={"activation_checkpointing": True})
    asked = replace(scenario("fsdp", 8), job=adapted.model_copy(update={"training": training}))
    assert asked.device.link.startswith("NVLink")
    alike = [r for r in published("fsdp2") if r["adapted"] and r["speed"] is not None]
    linked = [r for r in alike if not r["pcie"]]
    assert 0 < len(linked) < 5 < len(alike)
    trust = trust_in(asked)
    assert f"{len(linked)} with NVLink" in trust.speed.unlike
    slow = replace(asked, device=replace(asked.device, link="PCIe 4"))
    without = trust_in(slow).speed
    assert all("NVLink" not in words for words in without.unlike)


def test_a_bias_is_no_larger_than_the_error_that_it_is_part_of() -> None:
    for label in ("fsdp", "fsdp1", "zero1", "zero3", "ddp", "single"):
        trust = trust_in(scenario(label, 1))
        for known in (trust.allocated, trust.reserved, trust.speed):
            assert known is None or abs(known.bias) <= known.typical + 1e-9


def test_one_gpu_counts_runs_on_one_gpu_whatever_the_strategy() -> None:
    alone, several = (trust_in(scenario("zero1", ranks, activation_checkpointing=True)) for ranks in (1, 8))
    assert alone.allocated.runs > several.allocated.runs
    assert any(not r["adapted"] for r in published("single") if r["statistic"] == "allocated")
    assert trust_in(scenario("ddp", 1)).unseen == ()


def test_other_training_under_a_strategy_without_a_run_like_it_is_named() -> None:
    said = trust_in(scenario("ddp", 8)).lines()[0]
    runs = published("ddp")
    assert all(r["adapted"] for r in runs)
    assert "no published run like this (full training under ddp); ddp with adapters: memory ±" in said
    assert f"({len(runs)} published runs)" in said


def test_the_largest_assumption_is_the_one_of_the_question() -> None:
    plain = scenario("fsdp", 8)
    short = plain.job.data.model_copy(update={"sequence_length": 256})
    pcie = replace(plain.device, link="PCIe 4", link_bandwidth=32e9)
    own = replace(default_constants(plain.device), origin="my runs", fitted=("a",))
    texts = {
        "host memory gives the update of each rank 6 GB/s": scenario("zero3", 8, options={"offload": "cpu"}),
        "short": replace(plain, job=plain.job.model_copy(update={"data": short})),
        "no run on L40S": replace(plain, device=replace(plain.device, name="L40S")),
        "PCIe gives each GPU 25 GB/s": replace(plain, device=pcie),
        "as fast as eager code": replace(plain, job=job(model={"compile": "block"})),
        "4 bits": replace(plain, job=job(adapter={"kind": "lora", "base_dtype": "nf4"})),
        "my runs": replace(plain, constants=own),
    }
    for word, asked in texts.items():
        assert word in (trust_in(asked).assumption or ""), word
    assert "NCCL" in (trust_in(replace(plain, device=None)).assumption or "")


def test_speeds_of_other_gpus_say_that_none_is_of_this_one() -> None:
    plain = scenario("zero1", 8)
    other = replace(plain, device=replace(plain.device, name="MI300X"))
    assert "; none on MI300X)" in trust_in(other).lines()[0]
    assert "none on A100" not in trust_in(plain).lines()[0]


@pytest.mark.parametrize(
    ("device", "place"), [("cuda", "outside of it lie "), ("cpu", "gloo gives its buffers")]
)
def test_where_no_speed_is_predicted_the_assumption_is_of_memory(device: str, place: str) -> None:
    trust = trust_in(replace(scenario("fsdp", 8), torch_device=device), speed=False)
    assert trust.speed is None
    assert place in str(trust.assumption)


def test_strategies_of_one_answer_are_judged_together() -> None:
    one, other = trust_in(scenario("fsdp", 8)), trust_in(scenario("fsdp1", 8))
    both = trust_in(scenario("fsdp", 8), scenario("fsdp1", 8))
    assert both.speed.runs >= max(one.speed.runs, other.speed.runs)
    assert "fsdp and fsdp1" in both.runs


def test_cpu_ranks_are_judged_by_cpu_ranks() -> None:
    trust = trust_in(replace(scenario("fsdp1", 2), torch_device="cpu"), speed=False)
    errors = [abs(run["memory"]) for run in json.loads(CPU_ERRORS.read_text()) if run["kind"] == "fsdp1"]
    assert (trust.allocated.runs, trust.allocated.typical) == (len(errors), pytest.approx(mean(errors)))
    assert trust.reserved is None
    assert "runs on CPU ranks)" in trust.lines()[0]


def test_without_a_run_like_it_that_is_said_and_no_other_s_error_is_borrowed() -> None:
    plain = scenario("fsdp", 8)
    asked = {
        "fsdp-ring": scenario("fsdp-cp", 8),
        "optimizer.kind=adamw-8bit": replace(plain, job=job(optimizer={"kind": "adamw-8bit"})),
        "training.precision=fp8": replace(plain, job=job(training={"precision": "fp8"})),
        "adapters under fsdp": replace(plain, job=job(adapter={"kind": "lora"}), torch_device="cpu"),
    }
    for word, one in asked.items():
        trust = trust_in(one)
        assert (trust.allocated, trust.reserved, trust.speed) == (None, None, None), word
        assert "no published run like this" in trust.lines()[0], word
        assert word in trust.lines()[0]


def test_offload_is_judged_by_offload_alone() -> None:
    trust = trust_in(scenario("zero3", 8, options={"offload": "cpu"}))
    known = [one.runs for one in (trust.allocated, trust.reserved) if one]
    runs = published("zero3+offload")
    assert sum(known) == len([run for run in runs if run["memory"] is not None and not run["adapted"]])


def test_strategies_without_a_run_are_named_beside_those_with() -> None:
    trust = trust_in(scenario("fsdp1", 8), scenario("fsdp-cp", 8))
    assert trust.unseen == ("fsdp-ring",)
    assert "; no such run under fsdp-ring" in trust.lines()[0]
    assert trust.as_json()["unseen"] == ["fsdp-ring"]


def test_a_range_has_no_error_of_its_own() -> None:
    trust = trust_in(scenario("fsdp1", 8), bounded=True)
    assert (trust.allocated, trust.reserved) == (None, None)
    assert trust.speed is not None
    assert "memory is a range" in trust.lines()[0]
