"""Optimizers that a function of the user's own returns."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import harness
from harness.job.job import Job
from harness.job.pairs import why_refused
from harness.judge.quantities import rank_states, textbook, volume_differences, why_unknown
from tests.representatives import EXHAUSTIVE
from tests.traps.matrix import TINY

from .parity import assert_parity

pytestmark = pytest.mark.long(seconds=10)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp1")
FEW = ("zero2", "zero3", "fsdp")
FILE = Path(__file__).with_name("own_optimizer.py")
LION = f"optimizer.factory={FILE}:lion"


@pytest.mark.parametrize("strategies", [FEW, pytest.param(STRATEGIES, marks=EXHAUSTIVE)])
@pytest.mark.costly
def test_every_strategy_trains_as_one_process_and_counts_what_it_keeps(
    strategies: tuple[str, ...], matrix
) -> None:
    groups = "optimizer.groups=[{parameters: '*norm*', learning_rate: 2.0e-4}]"
    records = assert_parity(matrix, [LION, "optimizer.arguments={beta: 0.95}", groups], strategies)
    for label, record in records.items():
        assert record.backend.effective.optimizer.endswith("own_optimizer.Lion")
        assert record.observed.optimizer_used
        for states in rank_states(record):
            assert states.expected is None
            assert 0.9 < states.measured["optimizer"] / states.measured["gradients"] < 1.1, label
        assert textbook(record) is None
        assert record.world.world_size == 1 or (why_unknown(record), volume_differences(record)) == (None, [])


def ask(*command: str):
    sets = [word for setting in (*TINY, LION) for word in ("--set", setting)]
    return CliRunner().invoke(harness, [*command, *sets])


def test_what_it_will_keep_is_not_available_in_an_estimate() -> None:
    result = ask("estimate", "--backends", "ddp,zero1", "--world-size", "2", "--json")
    for row in json.loads(result.stdout)["rows"]:
        assert row["weights_bytes"] > 0
        assert row["sent_bytes_per_step"] > 0
        unknown = ("optimizer_bytes", "model_state_bytes", "textbook_model_state_bytes", "peak_bytes")
        assert [row[key] for key in unknown] == [None] * 4
        assert "counted in a run, not predicted" in row["memory_unknown"]


def test_recommend_refuses_with_the_reason() -> None:
    asked = ["--model", "gpt2", "--gpus", "2", "--gpu", "H100-80", "--tokens-per-step", "4096"]
    result = CliRunner().invoke(harness, ["recommend", *asked, "--set", LION])
    assert result.exit_code == 1
    assert "counted in a run, not predicted" in " ".join(result.output.split())


def test_fit_measures_without_a_prediction(tmp_path) -> None:
    limits = ("--limit", "100MB", "--most-runs", "1", "--runs", str(tmp_path))
    result = ask("fit", "--backend", "zero1", "--nproc", "2", *limits, "--json")
    assert result.exit_code == 0
    (trial,) = json.loads(result.stdout)["trials"]
    assert (trial["predicted_bytes"], trial["status"]) == (None, "ok")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no_optimizer", "returned a str; return an optimizer of torch"),
        ("of_some", "returned an optimizer of other tensors"),
        ("absent", "the module has no 'absent'"),
    ],
)
def test_what_is_no_optimizer_of_the_job_is_refused_before_a_run(function, reason, tmp_path) -> None:
    command = ["compare", "--set", f"optimizer.factory={FILE}:{function}", "--runs", str(tmp_path)]
    result = CliRunner().invoke(harness, command)
    assert result.exit_code == 1
    assert reason in " ".join(result.output.split())


@pytest.mark.parametrize("label", ["zero0", "pp", "cp", "tp"])
def test_other_strategies_are_unsupported(label: str) -> None:
    job = Job.model_validate({
        "optimizer": {"factory": "own:lion"}, "training": {"precision": "bf16-mixed"}
    })  # fmt: skip
    assert why_refused(label, 2, job) is not None
    in_fp32 = job.model_copy(update={"training": job.training.model_copy(update={"precision": "fp32"})})
    assert (why_refused(label, 2, in_fp32) is None) == (label == "zero0")
