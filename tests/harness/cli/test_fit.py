"""`harness fit` on CPU ranks with a limit on the counting allocator."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli.fit import _followed_by
from harness.cli.output import PREDICTING, PredictionCount

from .command_line import SMALL, harness, records, refused

pytestmark = pytest.mark.long(seconds=10)

LIMIT_BYTES = 3_000_000
ARGUMENTS = ["fit", "--backend", "zero2", "--nproc", "2", *SMALL, "--set", "training.global_batch_size=96"]


@dataclass
class Fit:
    folder: Path
    done: subprocess.CompletedProcess[str]
    answer: dict[str, Any]


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    folder = tmp_path_factory.mktemp("fit")
    done = harness(*ARGUMENTS, "--limit", str(LIMIT_BYTES), "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return Fit(folder, done, json.loads(done.stdout))


@pytest.mark.costly
def test_the_largest_fits_and_the_next_runs_out_of_memory(fit: Fit) -> None:
    found = fit.answer["micro_batch"]
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    largest = found["largest"]["micro_batch_size"]
    assert found["too_large"] == sizes[sizes.index(largest) + 1]
    assert found["complete"]
    assert found["largest"]["peak_bytes"] <= LIMIT_BYTES
    assert {trial["global_batch_size"] for trial in fit.answer["trials"]} == {96}


@pytest.mark.costly
def test_every_trial_is_a_record_with_its_limit(fit: Fit) -> None:
    found = {record.run_id: record for record in records(fit.folder / "runs")}
    assert found.keys() == {trial["run_id"] for trial in fit.answer["trials"]}
    assert {record.status for record in found.values()} == {"ok", "oom"}
    assert {record.world.memory_limit_bytes for record in found.values()} == {LIMIT_BYTES}
    refusals = [record.error.message for record in found.values() if record.error]
    assert all(f"of a limit of {LIMIT_BYTES} bytes" in message for message in refusals)


@pytest.mark.costly
def test_how_wrong_such_predictions_were_is_said(fit: Fit) -> None:
    known = fit.answer["trust"]
    assert known["speed"] is None
    assert known["allocated"]["whose"] == "runs on CPU ranks"
    assert f"({known['allocated']['runs']} runs on CPU ranks)" in fit.done.stderr
    assert f"largest assumption: {known['assumption']}" in fit.done.stderr


@pytest.mark.costly
def test_the_fastest_is_one_of_several(fit: Fit) -> None:
    rates = {trial["micro_batch_size"]: trial["tokens_per_second"] or 0 for trial in fit.answer["trials"]}
    assert len([rate for rate in rates.values() if rate]) > 1
    assert fit.answer["micro_batch"]["fastest"]["tokens_per_second"] == max(rates.values())


@pytest.mark.costly
def test_asking_again_runs_nothing(fit: Fit) -> None:
    before = set((fit.folder / "runs").iterdir())
    done = harness(*ARGUMENTS, "--limit", str(LIMIT_BYTES), cwd=fit.folder)
    assert done.stdout.startswith("largest micro-batch: ")
    assert set((fit.folder / "runs").iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--backend", "ddp"], "ranks on the CPU share the memory of the machine"),
        (
            ["--backend", "ddp", "--limit", "plenty"],
            "--limit takes bytes such as 2GB, or a GPU: GPU 'plenty' is unknown",
        ),
        (["--backend", "ddp", "--limit", "900TB"], "but this machine has"),
        (["--backend", "zero4", "--limit", "1GB"], "Did you mean 'zero3'"),
        (["--backend", "ddp", "--limit", "1GB", "--set", "training.global_batch_size=9"], "does not divide"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], problem: str) -> None:
    assert problem in refused(tmp_path, "fit", *arguments)


@pytest.mark.costly
def test_adapters_are_predicted(tmp_path: Path) -> None:
    asked = [*ARGUMENTS[:-2], "--set", "adapter.kind=lora", "--set", "adapter.targets=[q_proj,v_proj]"]
    done = harness(*asked, "--gpu", "3MB", "--most-runs", "1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads(done.stdout)["trials"]
    assert abs(trial["prediction_error"]) < 0.005


def test_predictions_are_counted_and_runs_speak_for_themselves() -> None:
    count = PredictionCount("prediction", "asking", lambda: None)
    called = _followed_by(count)
    called["on_prediction"]()
    called["on_prediction"]()
    assert count.text == f"{PREDICTING}: 2 predictions so far"
    called["on_event"](
        SimpleNamespace(backend="ddp", layout=SimpleNamespace(micro_batch_size=1), data_size=1)
    )
    assert count.doing == ""
