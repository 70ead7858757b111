from pathlib import Path

import pytest
from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.cli import harness
from harness.exported.tracking import scalars, settings
from harness.judge.comparison import Comparison
from harness.record import EvaluationPart
from harness.record.store import write_record
from tests.records import LOSSES, make_record, make_steps


def test_losses_of_a_run_are_read_back_from_tensorboard(tmp_path: Path) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    write_record(tmp_path / "runs" / "one", make_record(run_id="one"))
    arguments = ["export", "tracking", str(tmp_path / "runs"), "--to", "tensorboard", "-o"]
    done = CliRunner().invoke(harness, [*arguments, str(tmp_path / "board")])
    assert done.exit_code == 0, done.stderr
    assert "1 of 1 runs logged" in done.stderr
    board = EventAccumulator(str(tmp_path / "board" / "one"))
    board.Reload()
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(LOSSES)
    assert [event.step for event in board.Scalars("train/loss")] == [0, 1, 2, 3]
    (rate,) = board.Scalars("run/tokens_per_second")
    assert rate.value == 2048


def test_loss_that_is_not_finite_is_left_out() -> None:
    record = make_record(steps=make_steps([5.0, None], [1.0, None]))
    logged = dict(scalars(Comparison([record]).rows[0]))
    assert logged[0]["train/loss"] == 5.0
    assert "train/loss" not in logged[1]


def test_held_out_loss_stands_at_the_step_after_which_it_was_taken() -> None:
    record = make_record(eval=[EvaluationPart(step=2, loss=4.5, target_tokens=10)])
    logged = dict(scalars(Comparison([record]).rows[0]))
    assert {step for step, values in logged.items() if "evaluation/loss" in values} == {1}


def test_settings_are_simple_values_under_dotted_names() -> None:
    found = settings(Comparison([make_record(label="ddp")]).rows[0])
    assert found["backend"] == "ddp"
    assert found["job.training.global_batch_size"] == 8
    assert all(isinstance(value, str | int | float | bool) for value in found.values())


def test_tool_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    write_record(tmp_path / "runs" / "one", make_record())
    monkeypatch.setattr("harness.exported.tracking.find_spec", lambda name: None)
    arguments = ["export", "tracking", str(tmp_path / "runs"), "--to", "mlflow", "-o", str(tmp_path / "x")]
    done = CliRunner().invoke(harness, arguments)
    assert done.exit_code == 1
    assert "`pip install mlflow`" in done.stderr


def test_losses_of_a_run_are_read_back_from_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    write_record(tmp_path / "runs" / "one", make_record(run_id="one"))
    arguments = [
        "export",
        "tracking",
        str(tmp_path / "runs"),
        "--to",
        "mlflow",
        "-o",
        str(tmp_path / "board"),
    ]
    done = CliRunner().invoke(harness, arguments)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["board", "runs"]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'board' / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'sharding-harness'")
    (run,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [loss.value for loss in losses] == pytest.approx(LOSSES)
    assert run.data.params["backend"] == make_record().backend.label
