"""`harness recommend` as people type it."""

import json
from pathlib import Path
from typing import Any

import pytest

from .command_line import harness, refused

MACHINE = ["--gpus", "4", "--gpu", "H100-80", "--tokens-per-step", "40k"]
PLAIN = ["--set", "training.precision=fp32", "--set", "training.activation_checkpointing=false"]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("recommend")
    done = harness("recommend", "--model", "llama-3.2-1b", *MACHINE, *PLAIN, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Why not the others" in done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_model_that_fits_many_times_over_is_not_sharded(document: dict[str, Any]) -> None:
    assert document["data_parallel_is_right"] or document["advice"]["case"] == "communication-bound"
    assert len(document["best"]) == 3
    assert document["remarks"] == [
        "data.sequence_length=4096, since none is given",
        "runtime.preset=library-defaults, since none is given",
        "32,768 tokens per step instead of 40,000: 8 samples of 4,096, 2 for each of 4 GPUs",
    ]
    assert {row["backend"] for row in document["fitting"]} >= {"zero1", "zero3", "fsdp"}


def test_commands_name_the_model_as_it_was_named(document: dict[str, Any]) -> None:
    (line, *_) = document["commands"]["compare"]
    assert "--model llama-3.2-1b" in line
    assert "training.global_batch_size=8" in line


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"--model": "llama-3.1-9b"},
            "model 'llama-3.1-9b' is neither in the catalogue nor a folder or file",
        ),
        ({"--model": "bert-base"}, "`harness estimate --backends` gives its states"),
        ({"--gpu": "H100-81"}, "Did you mean 'H100-80'"),
        ({"--gpus": "12"}, "12 ranks do not fill nodes of 8 GPUs"),
        ({"--gpus": "16", "--fabric": "NDR401"}, "Did you mean 'NDR400'"),
        ({"--tokens-per-step": "lots"}, "--tokens-per-step was given 'lots'"),
        ({"--tokens-per-step": "5"}, "less than one sample"),
        ({"--set": "training.micro_batch_size=1"}, "training.micro_batch_size would be ignored"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, changes: dict[str, str], problem: str) -> None:
    given = {"--model": "llama-3.1-8b", **dict(zip(MACHINE[::2], MACHINE[1::2], strict=True))} | changes
    assert problem in refused(tmp_path, "recommend", *(word for pair in given.items() for word in pair))


def test_a_mixture_of_experts_is_answered_by_its_states(document: dict[str, Any], tmp_path: Path) -> None:
    words = ("recommend", "--model", "mixtral", "--gpu", "H100-80", "--fabric", "NDR400", "--json")
    few, many = (harness(*words, "--gpus", gpus, cwd=tmp_path) for gpus in ("8", "64"))
    assert (few.returncode, many.returncode) == (0, 0)
    lines = [line for line in few.stderr.splitlines() if not line.startswith("harness")]  # without progress
    said, shown = (" ".join(" ".join(text).split()) for text in (lines, many.stderr.splitlines()))
    ways = said.partition(" GB per rank ")[0]
    assert ways.startswith(
        "nothing fits; more GPUs: zero3 on 16 ranks, micro-batch 1: model states take 46.7 of"
    )
    assert " LoRA: fsdp on 8 ranks, micro-batch 1: model states take 11.7 of 84.9 GB" in ways
    assert " zero3 does not fit: model states take 93.4 of 84.9 GB" in said
    assert any("adapter.targets=" in one["command"] for one in json.loads(few.stdout)["alternatives"])
    assert "Use zero3, micro-batch 1, accumulation 8: model states take 11.7 of 84.9 GB, activations" in shown
    assert "fsdp holds 90.6 GB of states and zero3 11.7: FSDP2 cuts" in shown
    answer = json.loads(many.stdout)
    assert answer.keys() == document.keys()
    assert answer["best"][0].keys() == document["best"][0].keys()
    assert (answer["best"][0]["backend"], answer["best"][0]["tokens_per_second_per_gpu"]) == ("zero3", None)


def test_the_model_may_be_that_of_the_job_and_ranks_have_one_name(tmp_path: Path) -> None:
    words = ("recommend", "--config", "@default", "--gpu", "H100-80", "--json")
    answer = json.loads(harness(*words, "--gpus", "2", cwd=tmp_path).stdout)
    assert (answer["gpus"], bool(answer["best"])) == (2, True)
    of_runs = harness(*words, "--nproc", "8", cwd=tmp_path)
    assert of_runs.returncode == 2
    assert "the number of ranks is --gpus or --world-size" in of_runs.stderr
