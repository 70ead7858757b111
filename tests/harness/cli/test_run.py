"""`harness run`: its record, and what a person can get wrong: one line, exit code 1, nothing half done."""

import socket
from pathlib import Path

import pytest

from harness.record import Record
from tests.built_in import HYBRID
from tests.representatives import first

from .command_line import SHORT, harness, harness_process, records, refused

pytestmark = pytest.mark.long(seconds=15)


def test_run_prints_its_record(tmp_path: Path) -> None:
    command = ["run", "--backend", "ddp", "--nproc", "2", *SHORT, "--set", "measure.traced_steps=1", "--json"]
    done = harness(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = Record.model_validate_json(done.stdout)
    assert [printed] == records(tmp_path / "runs")
    assert printed.status == "ok"
    assert [step.window for step in printed.steps] == ["warmup", "probed", "traced", "timed"]
    assert len(printed.ranks) == 2
    assert printed.command[:2] == ["harness", "run"]
    assert printed.measure is not None
    assert (printed.measure.warmup_steps, printed.measure.cooldown_steps) == (1, 3)


def test_every_evaluation_is_timed(tmp_path: Path) -> None:
    evaluation = ["--set", "evaluation.every_steps=2", "--set", "evaluation.samples=5"]
    done = harness("run", "--backend", "ddp", "--nproc", "2", *SHORT, *evaluation, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = Record.model_validate_json(done.stdout).eval
    assert [(part.step, part.samples) for part in found] == [(2, 5), (4, 5)]
    assert all(part.seconds is not None and part.seconds > 0 for part in found)


def test_unknown_backend(tmp_path: Path) -> None:
    line = refused(tmp_path, "run", "--backend", "zerro3")
    assert "backend 'zerro3' is unknown" in line
    assert "Did you mean 'zero3'?" in line


def test_unknown_option(tmp_path: Path) -> None:
    assert "Did you mean 'offload'?" in refused(tmp_path, "run", "--backend", "zero3:ofload=cpu")


def test_option_that_is_no_yaml(tmp_path: Path) -> None:
    assert "offload" in refused(tmp_path, "run", "--backend", "zero3:offload=[x")


def test_unknown_key(tmp_path: Path) -> None:
    line = refused(tmp_path, "run", "--backend", "ddp", "--set", "training.step=3")
    assert "Did you mean 'steps'?" in line


def test_missing_configuration(tmp_path: Path) -> None:
    assert "none.yaml cannot be read" in refused(tmp_path, "run", "--backend", "ddp", "--config", "none.yaml")


def test_impossible_batch(tmp_path: Path) -> None:
    line = refused(
        tmp_path, "run", "--backend", "ddp", "--nproc", "3", "--set", "training.global_batch_size=8"
    )
    assert "leaves no whole micro_batch_size" in line


def test_several_ranks_of_the_reference(tmp_path: Path) -> None:
    assert "'single' is one process" in refused(tmp_path, "run", "--backend", "single", "--nproc", "2")


def test_missing_data(tmp_path: Path) -> None:
    line = refused(
        tmp_path, "run", "--backend", "ddp", "--set", "data.source=text", "--set", "data.path=none.txt"
    )
    assert f"data.path 'none.txt' does not exist in {tmp_path}; give an existing file" in line


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_empty_data(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").touch()
    line = refused(
        tmp_path, "run", "--backend", "ddp", "--set", f"data.source={source}", "--set", "data.path=empty"
    )
    assert "gives no sample" in line


def test_samples_longer_than_the_context(tmp_path: Path) -> None:
    line = refused(tmp_path, "run", "--backend", "ddp", "--set", "data.sequence_length=1024")
    assert "longer than the model's context of 512" in line


@pytest.mark.parametrize("backend", HYBRID)
def test_shard_size_that_does_not_divide(tmp_path: Path, backend: str) -> None:
    line = refused(tmp_path, "run", "--backend", f"{backend}:shard_size=3", "--nproc", "2", *SHORT)
    assert "shard_size" in line


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("bert", "is not a causal language model"), ("lama", "unknown to transformers")],
)
def test_model_that_cannot_be_trained(tmp_path: Path, model_type: str, why: str) -> None:
    line = refused(tmp_path, "run", "--backend", "ddp", "--set", f"model.config={{model_type: {model_type}}}")
    assert why in line


@pytest.mark.parametrize("offline", first(["0"], ["0", "1"]))
@pytest.mark.costly
def test_model_of_the_hub_without_network(tmp_path: Path, offline: str) -> None:
    line = refused(
        tmp_path, "run", "--backend", "ddp", "--set", "model.name=somebody/some-model",
        HF_HUB_OFFLINE=offline, HF_HOME=str(tmp_path / "hub"), HF_ENDPOINT="http://127.0.0.1:9",
    )  # fmt: skip
    assert "model.name 'somebody/some-model' cannot be loaded" in line


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused(tmp_path, "run", "--backend", "ddp", "--port", port)
    assert f"--port {port} cannot be used" in line


@pytest.mark.exhaustive
def test_pretrained_weights_leave_no_warning_of_semaphores(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=257)).save_pretrained(tmp_path / "model")
    words = [
        "run",
        "--backend",
        "ddp",
        "--nproc",
        "2",
        *SHORT[2:],
        "--set",
        "model.name=./model",
        "--set",
        "data.tokenizer=bytes",
    ]
    done = harness_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "semaphore" not in done.stderr
