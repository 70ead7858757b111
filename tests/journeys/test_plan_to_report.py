"""From an estimate to a recommendation, the commands that it prints, and what they say of the predictions."""

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.harness.cli.command_line import SHORT
from tests.journeys.journey import Journey

pytestmark = [pytest.mark.long(seconds=10), pytest.mark.costly]
MODEL = {
    "model_type": "llama", "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
JOB = [
    "--set", "training.precision=fp32", "--set", "data.sequence_length=32", "--set", "training.steps=4",
    "--set", "measure.warmup_steps=1", "--set", "measure.probed_steps=1",
]  # fmt: skip
TOKENS = 512


@pytest.fixture(scope="module")
def planned(shared_journey: Journey) -> dict[str, Any]:
    """What `recommend` says of a model that two ranks of this machine can run."""
    (shared_journey.folder / "tiny.json").write_text(json.dumps(MODEL))
    done = shared_journey.harness(
        "recommend", "--model", "tiny.json", "--gpus", "2", "--gpu", "A100-40", "--tokens-per-step",
        str(TOKENS), *JOB, "--json",
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_estimate_says_of_the_recommended_one_what_recommend_says(
    shared_journey: Journey, planned: dict[str, Any]
) -> None:
    best = planned["best"][0]
    batch = {
        "training.global_batch_size": TOKENS // 32,
        "training.micro_batch_size": best["micro_batch_size"],
        "training.activation_checkpointing": str(best["activation_checkpointing"]).lower(),
    }
    settings = [word for key, value in batch.items() for word in ("--set", f"{key}={value}")]
    done = shared_journey.harness(
        "estimate", "--model", "tiny.json", "--world-size", "2", "--gpu", "A100-40", "--backends",
        best["backend"], *JOB[:4], *settings, "--json",
    )  # fmt: skip
    document = json.loads(done.stdout)
    (row,) = document["rows"]
    assert document["job"]["preset"] == planned["preset"] == "library-defaults"
    assert row["tokens_per_second_per_gpu"] == best["tokens_per_second_per_gpu"]
    assert row["peak_bytes"] == best["peak_bytes"]


def test_every_printed_command_runs_and_the_report_judges_the_predictions(
    shared_journey: Journey, planned: dict[str, Any]
) -> None:
    *compared, report = planned["commands"]["compare"]
    for line in compared:
        shared_journey.printed(line)
    shared_journey.printed(report)
    records = {record.backend.label: record for record in shared_journey.records()}
    assert records.keys() >= {row["backend"] for row in planned["best"]}
    for row in planned["best"]:
        record = records[row["backend"]]
        assert record.status == "ok"
        assert record.world.preset == planned["preset"]
        assert record.world.micro_batch_size == row["micro_batch_size"]
        assert record.prediction is not None
    details = shared_journey.read("report.details.md")
    assert "predicted peak MB" in details
    assert "records unchanged" in shared_journey.harness("verify", "report.md").stdout


def test_every_printed_slurm_command_is_accepted(shared_journey: Journey, planned: dict[str, Any]) -> None:
    (shared_journey.folder / "site.yaml").write_text("name: here\n")  # of CPU ranks
    rendered = [line for line in planned["commands"]["slurm"] if " slurm render " in line]
    assert rendered
    prepared = ""  # a folder for each batch size
    for line in rendered:
        shared_journey.printed(line)
        words = line.split()
        folder = next(after for before, after in pairwise(words) if before == "-o")
        assert f"harness slurm submit {folder} --wait" in planned["commands"]["slurm"]
        assert list((shared_journey.folder / folder).glob("*.sbatch"))
        prepared += shared_journey.harness("slurm", "status", folder, PATH="/usr/bin:/bin").stdout
    for row in planned["best"]:
        assert f"  {row['backend']} " in prepared


@pytest.mark.exhaustive
def test_fit_and_simulate_go_on_with_the_recommended_one(
    shared_journey: Journey, planned: dict[str, Any]
) -> None:
    best = planned["best"][0]["backend"]
    fitted = shared_journey.harness(
        "fit", "--backend", best, "--nproc", "2", "--limit", "60MB", "--most-runs", "1", *SHORT, "--runs",
        "fits", "--set", f"runtime.preset={planned['preset']}",
    )  # fmt: skip
    assert "micro-batch" in fitted.stdout
    (record,) = shared_journey.records("fits")
    assert record.run_id in shared_journey.harness("show", "--runs", "fits").stdout
    simulated = shared_journey.harness(
        "simulate", "--backend", best, "--world-size", "2", "--model", "tiny.json", *JOB[:4]
    )
    assert "all_" in simulated.stdout or "reduce" in simulated.stdout
