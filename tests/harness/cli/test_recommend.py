"""`harness recommend` as people type it."""

import json
from pathlib import Path
from typing import Any

import pytest

from .command_line import harness, refused

pytestmark = pytest.mark.long(seconds=15)

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
MACHINE = ["--gpus", "4", "--gpu", "H100-80", "--tokens-per-step", "4096"]
PLAIN = ["--set", "training.precision=fp32", "--set", "training.activation_checkpointing=false"]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recommend")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    done = harness("recommend", "--model", "tiny.json", *MACHINE, *PLAIN, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Why not the others" in done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_model_that_fits_many_times_over_is_not_sharded(document: dict[str, Any]) -> None:
    assert document["data_parallel_is_right"] or document["advice"]["case"] == "communication-bound"
    assert len(document["best"]) == 3
    assert document["remarks"] == ["data.sequence_length=128, since none is given"]
    assert {row["backend"] for row in document["fitting"]} >= {"ddp", "zero1", "zero3", "fsdp"}


def test_commands_name_the_model_by_its_configuration(document: dict[str, Any]) -> None:
    (line, *_) = document["commands"]["compare"]
    assert '"hidden_size": 64' in line
    assert "training.global_batch_size=32" in line


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"--model": "llama-3.1-9b"},
            "model 'llama-3.1-9b' is neither in the catalogue nor a folder or file",
        ),
        ({"--model": "mixtral"}, "expert parallelism is called for"),
        ({"--gpu": "H100-81"}, "Did you mean 'H100-80'"),
        ({"--gpus": "12"}, "--gpus 12 is no multiple of --gpus-per-node 8"),
        ({"--gpus": "16"}, "give it with --fabric"),
        ({"--gpus": "16", "--fabric": "NDR401"}, "Did you mean 'NDR400'"),
        ({"--tokens-per-step": "lots"}, "--tokens-per-step was given 'lots'"),
        ({"--tokens-per-step": "5"}, "less than one sample"),
        ({"--set": "training.micro_batch_size=1"}, "training.micro_batch_size would be ignored"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, changes: dict[str, str], problem: str) -> None:
    given = {"--model": "llama-3.1-8b", **dict(zip(MACHINE[::2], MACHINE[1::2], strict=True))} | changes
    assert problem in refused(tmp_path, "recommend", *(word for pair in given.items() for word in pair))
