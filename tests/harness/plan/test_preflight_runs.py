from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.plan.limits import MemoryLimits
from harness.plan.models import load_model
from harness.plan.prediction import memory_bounds
from harness.plan.preflight import FORCE, CellPredictions, PlannedCell, predict_runs
from harness.plan.scenario import Scenario, with_settings
from harness.plan.trust import trust_in
from tests.harness.plan.plans import scenario
from tests.records import make_prediction

GB = 10**9


def candidate(key: str, label: str = "ddp", **changes: Any) -> PlannedCell:
    values: dict[str, Any] = {
        "key": key, "label": label, "world_size": 2, "ranks_per_node": 2, "torch_device": "cuda",
        "alike": key, "scenario": lambda: None,
    }  # fmt: skip
    return PlannedCell(**(values | changes))


def judged(*cases: tuple[str, str, int]) -> CellPredictions:
    """(label, verdict, predicted GB) of runs on devices of 80 GB; those that do not fit are refused."""
    found = CellPredictions()
    for label, verdict, peak in cases:
        found.candidates[label] = candidate(label, label)
        found.parts[label] = make_prediction(
            peak * GB, device_limit_bytes=80 * GB, verdict=verdict, refused=verdict == "does not fit"
        )
    return found


def raising(error: Exception) -> Callable[[], Scenario | None]:
    def scenario() -> Scenario | None:
        raise error

    return scenario


def test_what_fits_shares_a_line_and_the_rest_has_one_each() -> None:
    found = judged(
        ("zero3", "fits", 20), ("fsdp", "fits", 30), ("zero1", "close", 75), ("ddp", "does not fit", 131)
    )
    assert found.lines() == [
        "predicted memory: zero3 and fsdp on 2 ranks: fits: at most 30 GB of 80 GB per rank",
        "predicted memory: zero1 on 2 ranks: close: 75 GB of 80 GB per rank",
        "predicted memory: ddp on 2 ranks: cannot fit: 131 GB of 80 GB per rank",
    ]


def test_how_wrong_such_predictions_were_is_said_once() -> None:
    model = load_model("llama-3.2-1b")
    planned = {
        label: scenario(label, 2, model=model, activation_checkpointing=True) for label in ("fsdp1", "fsdp")
    }
    runs = [candidate(label, label, scenario=partial(planned.get, label)) for label in planned]
    found = predict_runs(runs, MemoryLimits(device_bytes=80 * GB))
    alone = trust_in(planned["fsdp1"], speed=False)
    part = found.parts["fsdp1"]
    assert alone.allocated is not None
    assert (part.typical_error, part.error_runs) == (alone.allocated.typical, alone.allocated.runs)
    assert part.assumption == alone.assumption
    (said,) = (line for line in found.lines() if line.startswith("typical error"))
    assert said == "; ".join(trust_in(*planned.values(), speed=False).lines())


def test_only_what_cannot_fit_is_refused() -> None:
    found = judged(("zero1", "close", 75), ("ddp", "does not fit", 131))
    assert found.refusal("zero1") is None
    assert found.refusal("ddp") == f"cannot fit: 131 GB of 80 GB per rank; {FORCE}"
    assert found.refusal("a run that nobody predicted") is None


@pytest.mark.parametrize(
    ("error", "words"),
    [(HarnessError("gpt5 is not covered"), "gpt5 is not covered"), (KeyError("depth"), "KeyError: 'depth'")],
)
def test_why_there_is_no_prediction_is_shown_once(error: Exception, words: str) -> None:
    runs = [candidate(label, label, scenario=raising(error)) for label in ("ddp", "fsdp")]
    found = predict_runs(runs, MemoryLimits())
    assert found.parts == {}
    assert found.lines() == [f"no prediction for ddp and fsdp on 2 ranks: {words}"]


def test_nothing_is_said_of_what_the_backend_will_refuse() -> None:
    run = candidate("a", "fsdp-hybrid:shard_size=3", scenario=raising(ZeroDivisionError()))
    assert predict_runs([run], MemoryLimits()).lines() == []


def test_equal_runs_are_predicted_once() -> None:
    asked: list[str] = []
    runs = [candidate(str(repeat), alike="ddp", scenario=lambda: asked.append("ddp")) for repeat in range(3)]
    predict_runs(runs, MemoryLimits())
    assert asked == ["ddp"]


@pytest.mark.parametrize("scenario", [lambda: None, raising(ValueError("no closed form"))])
def test_what_no_strategy_could_fit_is_refused_without_a_prediction(scenario: Any) -> None:
    changes = {"torch_device": "cpu", "world_size": 16, "ranks_per_node": 16, "parameters": 70 * GB}
    run = candidate("big", scenario=scenario, **changes)
    found = predict_runs([run], MemoryLimits(host_bytes=24 * GB))
    assert found.refusal("big") == f"cannot fit: at least 52.5 GB of 1.5 GB host memory per rank; {FORCE}"
    assert found.lines() == [
        "predicted memory: ddp on 16 ranks: cannot fit: at least 52.5 GB of 1.5 GB host memory per rank"
    ]
    assert predict_runs([run], MemoryLimits(host_bytes=24 * GB), force=True).refusal("big") is None


def test_what_some_strategy_could_fit_stays_unknown() -> None:
    run = candidate("small", torch_device="cpu", parameters=GB)
    found = predict_runs([run], MemoryLimits(host_bytes=24 * GB))
    assert found.refusal("small") is None
    assert found.lines() == [
        "no prediction for ddp on 2 ranks: the strategy of a third party's backend is not known"
    ]


def test_what_not_even_the_least_of_its_bounds_fits_is_refused() -> None:
    job = {"precision": "bf16-mixed", "sequence_length": 16384, "model": load_model("llama-3.2-1b")}
    compiled = with_settings(scenario("fsdp", 2, **job), {"model.compile": "block"})
    assert compiled is not None
    bounds = memory_bounds(compiled)
    assert bounds is not None
    least, most = (bound.device_bytes for bound in bounds)
    run = candidate("compiled", "fsdp", scenario=lambda: compiled)
    assert predict_runs([run], MemoryLimits(device_bytes=(least + most) // 2)).parts == {}
    refused = predict_runs([run], MemoryLimits(device_bytes=least * 9 // 10)).refusal("compiled")
    assert str(refused).startswith("cannot fit: at least ")


def test_what_is_not_modelled_is_refused_where_its_states_do_not_fit() -> None:
    own = scenario("zero3", 2, options={"stage3_max_live_parameters": 1})
    states, why = sum(own.held_states.values()), "stage3_max_live_parameters is not modelled"
    run = candidate("own", "zero3", scenario=lambda: own)
    found = predict_runs([run], MemoryLimits(device_bytes=2 * states))
    assert why in str(found.reason("own"))
    refused = predict_runs([run], MemoryLimits(device_bytes=states // 2)).refusal("own")
    assert str(refused).startswith("cannot fit: at least ")


@pytest.mark.parametrize(
    ("device_gb", "advice"),
    [
        (40, "it fits in a comparison with --set training.micro_batch_size=1"),
        (24, "it fits in a comparison with --set model.config.num_hidden_layers=8 "
             "--set training.micro_batch_size=1"),
        (4, "compare a smaller model, or where there is more memory"),
    ],
)  # fmt: skip
def test_a_reference_that_cannot_fit_is_named_once_with_a_remedy(device_gb: int, advice: str) -> None:
    model = load_model("llama-3.2-1b")
    alone = with_settings(
        scenario("single", 1, model=model, micro_batch_size=64, activation_checkpointing=True),
        {"model.config": dict(model.config)},
    )
    assert alone is not None
    planned = {
        "single": alone,
        "single:precision=cast": replace(alone, label="single:precision=cast", options={"precision": "cast"}),
        "fsdp": scenario("fsdp", 64, model=model, micro_batch_size=1),
    }
    runs = [
        candidate(label, label, scenario=partial(planned.get, label), world_size=plan.world_size)
        for label, plan in planned.items()
    ]
    found = predict_runs(runs, MemoryLimits(device_bytes=device_gb * GB))
    assert found.refusal("single:precision=cast") is not None
    of_reference = [line for line in found.lines() if "single" in line and "typical error" not in line]
    assert of_reference[0].startswith("predicted memory: single on 1 rank: cannot fit: ")
    assert of_reference[1:] == [
        f"parity cannot be judged: the reference, single on 1 rank, cannot fit; {advice}"
    ]
    forced = predict_runs(runs, MemoryLimits(device_bytes=device_gb * GB), force=True)
    assert not any("parity" in line for line in forced.lines())
