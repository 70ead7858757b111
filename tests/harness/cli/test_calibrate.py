"""`--calibrate` of `harness estimate` and `harness recommend`: what is given, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli.estimate import estimate, recommend
from harness.plan.calibration import Calibration, CellFit, write_calibration

QUESTION = ("--model", "bloom-560m", "--backends", "ddp", "--gpu", "A100-80", "--json")
RUNS = Path(__file__).parents[3] / "reports" / "shaped-links" / "200mbit" / "runs.tar.xz"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    cell = CellFit(
        cell="ddp", group="here", measured_seconds=1.0, spread=0.1, fitted_seconds=1.0, left_out_seconds=1.05
    )
    calibration = Calibration(
        device="A100-80", transport="nccl", constants={"step_overhead_seconds": 5.0}, cells=[cell]
    )
    write_calibration(calibration, path)
    return path


def test_a_saved_calibration_replaces_constants_and_its_error_is_said(saved: Path) -> None:
    before, after = (
        CliRunner().invoke(estimate, [*QUESTION, *more]) for more in ((), ("--calibrate", str(saved)))
    )
    assert (before.exit_code, after.exit_code) == (0, 0)
    assert "median error 5.0%" in after.stderr
    steps = [json.loads(result.stdout)["rows"][0]["step_seconds"] for result in (before, after)]
    assert steps[1] == pytest.approx(steps[0] + 5)


def test_recommend_takes_it_too(saved: Path) -> None:
    question = ["--model", "bloom-560m", "--gpus", "1", "--gpu", "A100-80", "--tokens-per-step", "8192"]
    result = CliRunner().invoke(recommend, [*question, "--json", "--calibrate", str(saved)])
    assert result.exit_code == 0, result.stderr
    assert "median error 5.0%" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--save-calibration", "c.json"], "--save-calibration needs --calibrate RUNS"),
        (["--calibrate", "missing.json"], "calibration missing.json cannot be read"),
        (["--calibrate", "missing"], "missing"),
        (["--calibrate", str(RUNS)], ", not A100-80; calibrate with records of A100-80"),
    ],
)
def test_what_goes_wrong_is_one_line(arguments: list[str], line: str) -> None:
    result = CliRunner().invoke(estimate, [*QUESTION, *arguments])
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("harness: ")
    assert line in last


def test_without_a_gpu_there_is_nothing_to_calibrate(saved: Path) -> None:
    result = CliRunner().invoke(estimate, ["--model", "bloom-560m", "--calibrate", str(saved)])
    assert result.exit_code == 1
    assert "--calibrate needs the GPU that the runs were made on; name it with --gpu" in result.stderr


def test_a_saved_calibration_stands_alone(saved: Path) -> None:
    result = CliRunner().invoke(estimate, [*QUESTION, "--calibrate", str(saved), "--calibrate", str(RUNS)])
    assert result.exit_code == 1
    assert "is a saved calibration and stands alone" in result.stderr


def test_details_show_the_ratios_of_decision_guides() -> None:
    result = CliRunner().invoke(
        estimate, ["--model", "bloom-560m", "--backends", "ddp", "--gpu", "A100-80", "--details"]
    )
    assert "ratio of decision guides" in result.stdout
    assert "communication over computing, both at their peaks" in result.stdout
