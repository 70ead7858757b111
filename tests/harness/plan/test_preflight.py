"""What fits, what is refused, and what is said of it, before anything runs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from harness.backends.model_source import AskedLoading
from harness.errors import HarnessError
from harness.job.batch import batch_layout
from harness.job.config import load_experiment
from harness.launch.cells import make_cell
from harness.plan.hardware import MemoryLimits
from harness.plan.models import load_model
from harness.plan.prediction import MemoryPrediction, Moment, host_bytes, loading_bytes, memory_bounds
from harness.plan.preflight import (
    FORCE,
    OTHER,
    CellPredictions,
    judged,
    predict_runs,
    size,
    telling_demand,
    tightest_demand,
)
from harness.plan.scenario import Scenario, with_settings
from harness.plan.trust import trust_in
from harness.record import PredictionPart
from harness.run_directory.request import RunRequest
from tests.harness.plan.plans import llama, scenario, term
from tests.records import make_prediction

GB = 10**9


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


def test_a_limit_of_the_job_counts_where_it_is_the_smaller_and_without_any_nothing_is_judged() -> None:
    assert on_gpus(60 * GB).verdict is None
    assert on_gpus(60 * GB, device_bytes=80 * GB, imposed_bytes=50 * GB).verdict == "does not fit"
    assert on_gpus(30 * GB, device_bytes=40 * GB, imposed_bytes=50 * GB).device_limit_bytes == 40 * GB


def test_the_host_must_hold_the_whole_model_once_for_each_rank() -> None:
    """A device of 80 GB each is enough, a node of 200 GB is not."""
    part = on_gpus(30 * GB, device_bytes=80 * GB, host_bytes=200 * GB)
    whole = 4 * llama().parameters
    assert part.host_bytes >= 8 * whole > 200 * GB
    assert part.verdict == "does not fit"
    demand = tightest_demand(part, 8)
    assert str(demand).endswith("of 25 GB host memory per rank")


def test_a_run_on_gpus_shows_the_memory_of_the_device() -> None:
    """The host has less to spare, but enough."""
    part = on_gpus(10 * GB, device_bytes=80 * GB, host_bytes=400 * GB)
    tightest, shown = tightest_demand(part, 8), telling_demand(part, 8, "cuda")
    assert tightest.place == "host memory per rank"
    assert str(shown) == "11 GB of 80 GB per rank"
    assert telling_demand(part, 8, "cpu") == tightest
    short = on_gpus(10 * GB, device_bytes=80 * GB, host_bytes=200 * GB)
    assert str(telling_demand(short, 8, "cuda")).endswith("of 25 GB host memory per rank")


def test_a_host_that_holds_no_whole_model_is_no_refusal_of_slices() -> None:
    """Llama 3.1 70B on 64 H100: 8 ranks of a node would hold 2.3 TB together."""
    model = load_model("llama-3.1-70b")
    limits = MemoryLimits(device_bytes=80 * GB, host_bytes=2000 * GB)
    asked: dict[AskedLoading, PredictionPart] = {
        loading: judged(scenario("fsdp", 64, model=model, loading=loading), prediction(40 * GB), limits)
        for loading in ("slices", "full")
    }
    assert {loading: part.verdict for loading, part in asked.items()} == {
        "slices": "fits",
        "full": "does not fit",
    }
    assert asked["slices"].host_bytes < 40 * GB
    assert asked["full"].host_bytes >= 8 * 4 * model.parameters


def test_ranks_on_the_cpu_share_the_memory_of_the_host() -> None:
    plan = scenario("zero3", world_size=16, ranks_per_node=16, torch_device="cpu", loading="full")
    part = judged(plan, prediction(2 * GB), MemoryLimits(host_bytes=64 * GB))
    assert part.host_bytes == loading_bytes(plan) == 16 * 4 * llama().parameters
    assert part.verdict == "does not fit"
    larger = judged(plan, prediction(30 * GB), MemoryLimits(host_bytes=1000 * GB))
    assert (larger.host_bytes, larger.verdict) == (16 * 30 * GB, "fits")


def test_the_host_holds_what_all_ranks_of_its_node_offload() -> None:
    plans = [scenario("zero3", world_size=size, options={"offload": "cpu"}) for size in (1, 8, 16)]
    alone, node, nodes = map(host_bytes, plans)
    assert alone > 12 * llama().parameters
    assert node == pytest.approx(alone, rel=1e-3)
    assert nodes == pytest.approx(node / 2, rel=1e-3)
    part = judged(plans[1], prediction(2 * GB, host_bytes=900 * GB), MemoryLimits(host_bytes=1000 * GB))
    assert (part.host_bytes, part.verdict) == (900 * GB, "fits")


@pytest.mark.parametrize(
    ("count", "text"),
    [(131.4e9, "131 GB"), (2.25e9, "2.25 GB"), (80e9, "80 GB"), (620_000, "0.62 MB"), (1234e9, "1,234 GB")],
)
def test_sizes_are_short(count: float, text: str) -> None:
    assert size(count) == text


def candidate(key: str, label: str = "ddp", *, world_size: int = 2, device: str = "cuda") -> RunRequest:
    experiment = load_experiment(None, [f"training.global_batch_size={world_size}"])
    layout = batch_layout(experiment.training, world_size)
    cell = make_cell(experiment, label, world_size, layout, 0, device)
    return cell.model_copy(update={"key": key})


def parameters(of: RunRequest, count: int) -> dict[str, dict[str, Any]]:
    return {of.job_id: {"parameters": count}}


def outcomes(*cases: tuple[str, str, int]) -> CellPredictions:
    """(label, verdict, predicted GB) of runs on devices of 80 GB; those that do not fit are refused."""
    found = CellPredictions()
    for label, verdict, peak in cases:
        found.candidates[label] = candidate(label, label)
        found.parts[label] = make_prediction(
            peak * GB, device_limit_bytes=80 * GB, verdict=verdict, refused=verdict == "does not fit"
        )
    return found


def raising(error: Exception) -> Callable[[], Scenario | None]:
    return Mock(side_effect=error)


def test_what_fits_shares_a_line_the_rest_has_one_each_and_only_what_cannot_fit_is_refused() -> None:
    found = outcomes(
        ("zero3", "fits", 20), ("fsdp", "fits", 30), ("zero1", "close", 75), ("ddp", "does not fit", 131)
    )
    assert found.lines() == [
        "predicted memory: zero3 and fsdp on 2 ranks: fits: at most 30 GB of 80 GB per rank",
        "predicted memory: zero1 on 2 ranks: close: 75 GB of 80 GB per rank",
        "predicted memory: ddp on 2 ranks: cannot fit: 131 GB of 80 GB per rank",
    ]
    assert found.refusal("zero1") is found.refusal("a run that nobody predicted") is None
    assert found.refusal("ddp") == f"cannot fit: 131 GB of 80 GB per rank; {FORCE}"


def test_how_wrong_such_predictions_were_is_said_once() -> None:
    model = load_model("llama-3.2-1b")
    planned = {
        label: scenario(label, 2, model=model, activation_checkpointing=True) for label in ("fsdp1", "fsdp")
    }
    runs = [candidate(label, label) for label in planned]
    limits = MemoryLimits(device_bytes=80 * GB)
    found = predict_runs(runs, limits, scenario=lambda cell: planned[cell.backend])
    alone = trust_in(planned["fsdp1"], speed=False)
    part = found.parts["fsdp1"]
    assert (part.typical_error, part.error_runs) == (alone.memory.typical, alone.memory.runs)
    assert part.assumption == alone.assumption
    (said,) = (line for line in found.lines() if line.startswith("typical error"))
    assert said == "; ".join(trust_in(*planned.values(), speed=False).lines())


@pytest.mark.parametrize(
    ("error", "words"),
    [(HarnessError("gpt5 is not covered"), "gpt5 is not covered"), (KeyError("depth"), "KeyError: 'depth'")],
)
def test_why_there_is_no_prediction_is_shown_once(error: Exception, words: str) -> None:
    runs = [candidate(label, label) for label in ("ddp", "fsdp")]
    found = predict_runs(runs, MemoryLimits(), scenario=raising(error))
    assert found.parts == {}
    assert found.lines() == [f"no prediction for ddp and fsdp on 2 ranks: {words}"]


def test_nothing_is_said_of_what_the_backend_will_refuse_and_equal_runs_are_predicted_once() -> None:
    run = candidate("a", "fsdp-hybrid:shard_size=3")
    assert predict_runs([run], MemoryLimits(), scenario=raising(ZeroDivisionError())).lines() == []
    asked = Mock(return_value=None)
    predict_runs(map(candidate, "012"), MemoryLimits(), scenario=asked)
    asked.assert_called_once()


@pytest.mark.parametrize("scenario", [lambda _: None, raising(ValueError("no closed form"))])
def test_what_no_strategy_could_fit_is_refused_without_a_prediction(scenario: Any) -> None:
    run, limits = candidate("big", device="cpu", world_size=16), MemoryLimits(host_bytes=24 * GB)
    ask = partial(predict_runs, [run], limits, scenario=scenario)
    found, large = ask(parameters(run, 70 * GB)), "at least 52.5 GB of 1.5 GB host memory per rank"
    assert found.refusal("big") == f"cannot fit: {large}; {FORCE}"
    assert found.lines() == [f"predicted memory: ddp on 16 ranks: cannot fit: {large}"]
    assert ask(parameters(run, 70 * GB), force=True).refusal("big") is None
    # What some strategy could fit stays unknown.
    small = ask(parameters(run, GB))
    assert small.refusal("big") is None
    assert small.lines()[0].startswith("no prediction for ddp on 16 ranks: ")


def test_what_not_even_the_least_of_its_bounds_fits_is_refused() -> None:
    job = {"precision": "bf16-mixed", "sequence_length": 16384, "model": load_model("llama-3.2-1b")}
    compiled = with_settings(scenario("fsdp", 2, **job), {"model.compile": "block"})
    bounds = memory_bounds(compiled)
    least, most = (bound.device_bytes for bound in bounds)
    ask = partial(predict_runs, [candidate("compiled", "fsdp")], scenario=lambda _: compiled)
    assert ask(MemoryLimits(device_bytes=(least + most) // 2)).parts == {}
    refused = ask(MemoryLimits(device_bytes=least * 9 // 10)).refusal("compiled")
    assert str(refused).startswith("cannot fit: at least ")


def test_what_is_not_modelled_is_refused_where_its_states_do_not_fit() -> None:
    own = scenario("zero3", 2, options={"stage3_max_live_parameters": 1})
    states, why = sum(own.held_states.values()), "stage3_max_live_parameters is not modelled"
    ask = partial(predict_runs, [candidate("own", "zero3")], scenario=lambda _: own)
    assert why in str(ask(MemoryLimits(device_bytes=2 * states)).reason("own"))
    refused = ask(MemoryLimits(device_bytes=states // 2)).refusal("own")
    assert str(refused).startswith("cannot fit: at least ")


def test_a_reference_that_cannot_fit_is_named_once_with_a_remedy() -> None:
    device_gb = 40
    model = load_model("llama-3.2-1b")
    plan = scenario("single", 1, model=model, micro_batch_size=64, activation_checkpointing=True)
    alone = with_settings(plan, {"model.config": dict(model.config)})
    cast = replace(alone, label="single:precision=cast", options={"precision": "cast"})
    sharded = scenario("fsdp", 64, model=model, micro_batch_size=1)
    plans = {one.label: one for one in (alone, cast, sharded)}
    runs = [candidate(label, label, world_size=one.world_size) for label, one in plans.items()]
    limits, ask = MemoryLimits(device_bytes=device_gb * GB), lambda cell: plans[cell.backend]
    found = predict_runs(runs, limits, scenario=ask)
    assert found.refusal("single:precision=cast") is not None
    of_reference = [line for line in found.lines() if "single" in line and "typical error" not in line]
    assert of_reference[0].startswith("predicted memory: single on 1 rank: cannot fit: ")
    parity = f"parity cannot be judged: the reference, single on 1 rank, cannot fit; {OTHER}"
    assert of_reference[1:] == [parity]
    forced = predict_runs(runs, limits, force=True, scenario=ask)
    assert not any("parity" in line for line in forced.lines())
