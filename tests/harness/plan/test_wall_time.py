"""Times assumed before anything ran, next to published runs."""

from statistics import median

import pytest

from harness.job.config import load_experiment
from harness.launch.cells import plan
from harness.plan.preflight import assumed_time
from harness.record.store import read_runs
from tests.docs.markdown import ROOT

FACTOR = 3


def test_the_published_default_runs_took_as_long_within_a_factor_of_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two cores, two ranks: time in steps, and not in evaluations or probes."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    experiment = load_experiment(ROOT / "configs" / "default.yaml")
    cells = {cell.backend: cell for cell in plan(experiment, ["all"], [2], 1, "cpu")}
    seen: dict[str, list[float]] = {}
    for _, record in read_runs([ROOT / "reports" / "default"])[0]:
        if record.status == "ok" and record.backend.label in cells and record.world.world_size == 2:
            steps = [step.seconds for step in record.steps]
            seen.setdefault(record.backend.label, []).append(median(steps) * len(steps))
    assert len(seen) > 5
    for label, seconds in seen.items():
        assumed = assumed_time(cells[label], "cpu")
        assert assumed is not None
        assert 1 / FACTOR < median(seconds) / assumed.steps < FACTOR, label


def test_a_larger_model_takes_longer_and_a_gpu_that_no_table_knows_has_no_time() -> None:
    def cell(layers: int) -> object:
        settings = [f"model.config.num_hidden_layers={layers}", "compare.noise_runs=false"]
        return plan(load_experiment(None, settings), ["ddp"], [2], 1, "cpu")[-1]

    small, large = (assumed_time(cell(layers), "cpu") for layers in (2, 20))  # type: ignore[arg-type]
    assert small is not None
    assert large is not None
    assert small.steps < large.steps
    assert assumed_time(cell(2), "cuda") is None  # type: ignore[arg-type]
