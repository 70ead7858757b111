from __future__ import annotations

import pytest

from harness.backends.model_source import Loading
from harness.forms.terms import Term
from harness.plan.limits import MemoryLimits
from harness.plan.models import load_model
from harness.plan.prediction import MemoryPrediction, Moment, host_bytes, loading_bytes
from harness.plan.preflight import judged, size, telling_demand, tightest_demand
from harness.record import PredictionPart
from tests.harness.plan.plans import llama, scenario

GB = 10**9


def term(kind: str, count: int, *, host: bool = False) -> Term:
    return Term(kind=kind, name=kind, bytes=count, formula="", source="test", host=host)


def prediction(peak_bytes: int, *, overhead: int = 0, host_bytes: int = 0) -> MemoryPrediction:
    """Two moments, of which the optimizer step is the fuller one."""
    step = (term("weights", peak_bytes - 7), term("temporary", 7), term("optimizer", 10 * GB, host=True))
    return MemoryPrediction(
        moments=(
            Moment(name="forward/backward", terms=(term("weights", 5),)),
            Moment(name="optimizer step", terms=step),
        ),
        overhead=(term("buffers", overhead),),
        host_bytes_per_node=host_bytes,
    )


def on_gpus(peak_bytes: int, **limits: int) -> PredictionPart:
    return judged(scenario("ddp", world_size=8), prediction(peak_bytes, overhead=GB), MemoryLimits(**limits))


@pytest.mark.parametrize(
    ("peak", "verdict"),
    [(60 * GB, "fits"), (75 * GB, "close"), (79 * GB, "close"), (80 * GB, "does not fit")],
)
def test_peak_and_overhead_are_held_against_the_device(peak: int, verdict: str) -> None:
    part = on_gpus(peak, device_bytes=80 * GB)
    assert (part.device_bytes, part.verdict) == (peak + GB, verdict)


def test_the_decisive_moment_is_kept_with_its_kinds_on_the_device() -> None:
    part = on_gpus(60 * GB)
    assert part.moment == "optimizer step"
    assert part.kinds == {"weights": 60 * GB - 7, "temporary": 7}
    assert sum(part.kinds.values()) == part.peak_bytes


def test_without_a_limit_nothing_is_judged() -> None:
    assert on_gpus(60 * GB).verdict is None


def test_a_limit_of_the_job_counts_where_it_is_the_smaller() -> None:
    assert on_gpus(60 * GB, device_bytes=80 * GB, imposed_bytes=50 * GB).verdict == "does not fit"
    assert on_gpus(30 * GB, device_bytes=40 * GB, imposed_bytes=50 * GB).device_limit_bytes == 40 * GB


def test_the_host_must_hold_the_whole_model_once_for_each_rank() -> None:
    """A device of 80 GB each is enough, a node of 200 GB is not."""
    part = on_gpus(30 * GB, device_bytes=80 * GB, host_bytes=200 * GB)
    whole = 4 * llama().parameters
    assert part.host_bytes >= 8 * whole > 200 * GB
    assert part.verdict == "does not fit"
    demand = tightest_demand(part, 8)
    assert demand is not None
    assert str(demand).endswith("of 25 GB host memory per rank")


def test_a_run_on_gpus_shows_the_memory_of_the_device() -> None:
    """The host has less to spare, but enough."""
    part = on_gpus(10 * GB, device_bytes=80 * GB, host_bytes=400 * GB)
    tightest, shown = tightest_demand(part, 8), telling_demand(part, 8, "cuda")
    assert tightest is not None
    assert tightest.place == "host memory per rank"
    assert str(shown) == "11 GB of 80 GB per rank"
    assert telling_demand(part, 8, "cpu") == tightest
    short = on_gpus(10 * GB, device_bytes=80 * GB, host_bytes=200 * GB)
    assert str(telling_demand(short, 8, "cuda")).endswith("of 25 GB host memory per rank")


def test_a_host_that_holds_no_whole_model_is_no_refusal_of_slices() -> None:
    """Llama 3.1 70B on 64 H100: 8 ranks of a node would hold 2.3 TB together."""
    model = load_model("llama-3.1-70b")
    limits = MemoryLimits(device_bytes=80 * GB, host_bytes=2000 * GB)
    asked: dict[Loading, PredictionPart] = {
        loading: judged(scenario("fsdp", 64, model=model, loading=loading), prediction(40 * GB), limits)
        for loading in ("slices", "broadcast", "full")
    }
    assert {loading: part.verdict for loading, part in asked.items()} == {
        "slices": "fits", "broadcast": "fits", "full": "does not fit",
    }  # fmt: skip
    assert asked["slices"].host_bytes < 40 * GB
    assert asked["full"].host_bytes >= 8 * 4 * model.parameters


def test_ranks_on_the_cpu_share_the_memory_of_the_host() -> None:
    plan = scenario("zero3", world_size=16, ranks_per_node=16, torch_device="cpu", loading="full")
    part = judged(plan, prediction(2 * GB), MemoryLimits(host_bytes=64 * GB))
    assert part.host_bytes == loading_bytes(plan) > 16 * 4 * llama().parameters
    assert part.verdict == "does not fit"
    larger = judged(plan, prediction(30 * GB), MemoryLimits(host_bytes=1000 * GB))
    assert (larger.host_bytes, larger.verdict) == (16 * 30 * GB, "fits")


def test_the_host_holds_what_all_ranks_of_its_node_offload() -> None:
    alone, node, nodes = (
        host_bytes(scenario("zero3", world_size=size, options={"offload": "cpu"})) for size in (1, 8, 16)
    )
    assert alone > 12 * llama().parameters
    assert node == pytest.approx(alone, rel=1e-3)
    assert nodes == pytest.approx(node / 2, rel=1e-3)


def test_offloaded_states_count_on_the_host() -> None:
    plan = scenario("zero3", world_size=8, options={"offload": "cpu"})
    part = judged(plan, prediction(2 * GB, host_bytes=900 * GB), MemoryLimits(host_bytes=1000 * GB))
    assert (part.host_bytes, part.verdict) == (900 * GB, "fits")


@pytest.mark.parametrize(
    ("count", "text"),
    [(131.4e9, "131 GB"), (2.25e9, "2.25 GB"), (80e9, "80 GB"), (620_000, "0.62 MB"), (1234e9, "1,234 GB")],
)
def test_sizes_are_short(count: float, text: str) -> None:
    assert size(count) == text
