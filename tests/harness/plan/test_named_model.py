import json
from pathlib import Path

import pytest

from harness.cli.options import load_job
from harness.job.config import load_experiment
from harness.plan.models import load_model, model_settings

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_a_model_of_the_catalogue_is_run_by_its_configuration_without_the_hub() -> None:
    job = load_experiment(None, model_settings("llama-3.1-8b"))
    assert job.model.name is None
    assert job.model.config is not None
    assert (job.model.config["model_type"], job.model.config["hidden_size"]) == ("llama", 4096)


def test_a_file_is_run_by_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINY))
    job = load_experiment(None, model_settings(str(file)))
    assert job.model.config is not None
    assert TINY.items() <= job.model.config.items()
    assert load_model(str(file)).layers == 2


def test_a_folder_is_run_by_its_path_with_random_weights(tmp_path: Path) -> None:
    job = load_experiment(None, model_settings(str(tmp_path)))
    assert (job.model.name, job.model.weights) == (str(tmp_path), "random")


def test_the_model_replaces_the_one_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: {name: gpt2, attention: eager}\ndata: {sequence_length: 64}\n")
    job = load_job(file, ("data.limit=8",), "llama-3.2-1b")
    assert job.model.name is None
    assert job.model.config is not None
    assert (job.model.config["hidden_size"], job.model.attention) == (2048, "eager")
    assert (job.data.sequence_length, job.data.limit) == (64, 8)
    assert load_job(file, (), None).model.name == "gpt2"


@pytest.mark.parametrize(
    "own",
    [
        "{name: gpt2, weights: pretrained, revision: main}",
        "{name: gpt2, trust_remote_code: true}",
        "{factory: 'own_model:model', arguments: {width: 32}, block_class: Block}",
    ],
)
def test_nothing_of_where_the_replaced_model_came_from_is_left(own: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"model: {own}\n")
    assert load_job(file, (), "gpt2").model == load_job(None, (), "gpt2").model
    assert load_job(file, (), str(tmp_path)).model == load_job(None, (), str(tmp_path)).model
