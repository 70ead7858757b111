"""Values of settings as `--set` and files write them."""

from pathlib import Path

import pytest

from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from tests.harness.job.refusals import refused


def test_no_file_and_no_assignment_is_the_default_job() -> None:
    assert load_experiment(None) == Experiment()


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1E-3", 1e-3), ("0.002", 0.002), ("3e-4", 3e-4), ("1", 1.0)]
)
def test_set_reads_numbers_as_a_person_writes_them(text: str, value: float) -> None:
    experiment = load_experiment(None, [f"optimizer.learning_rate={text}"])
    assert experiment.optimizer.learning_rate == value


def test_set_reads_null_as_absent() -> None:
    experiment = load_experiment(None, ["training.gradient_clipping=null"])
    assert experiment.training.gradient_clipping is None


def test_set_reads_mappings_lists_and_booleans() -> None:
    experiment = load_experiment(
        None,
        [
            "model.config={hidden_size: 32, num_hidden_layers: 2}",
            "compare.backends=[ddp, zero1]",
            "data.shuffle=false",
        ],
    )
    assert experiment.model.config == {"hidden_size": 32, "num_hidden_layers": 2}
    assert experiment.compare.backends == ["ddp", "zero1"]
    assert experiment.data.shuffle is False


def test_set_reaches_into_the_model_configuration() -> None:
    experiment = load_experiment(None, ["model.config.hidden_size=64", "model.config.num_hidden_layers=1"])
    assert experiment.model.config == {"hidden_size": 64, "num_hidden_layers": 1}


def test_exponent_within_a_mapping_is_a_number() -> None:
    experiment = load_experiment(None, ["model.config={rms_norm_eps: 1e-5}"])
    assert experiment.model.config == {"rms_norm_eps": 1e-5}


def test_exponent_within_the_model_configuration_of_a_file_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model:\n  config:\n    rms_norm_eps: 1e-5\n")
    assert load_experiment(path).model.config == {"rms_norm_eps": 1e-5}


def test_a_later_set_wins_and_set_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("training:\n  steps: 7\n  seed: 5\n")
    experiment = load_experiment(path, ["training.steps=8", "training.steps=9"])
    assert experiment.training.steps == 9
    assert experiment.training.seed == 5


@pytest.mark.parametrize(
    "assignment", ["training.steps", "training.steps=", "training.steps= ", "=3", "training.=3", ".steps=3"]
)
def test_set_without_key_or_value_is_refused(assignment: str) -> None:
    assert f"--set was given '{assignment}'; write SECTION.KEY=VALUE" in refused(assignment)


def test_set_below_a_value_is_refused(tmp_path: Path) -> None:
    assert "'steps' is a value (3), not a section" in refused("training.steps=3", "training.steps.more=1")


def test_value_for_a_section_is_refused_with_its_settings() -> None:
    message = refused("schedule=3")
    assert "'schedule' was given 3; it is a section with kind, warmup_steps, final_fraction" in message


@pytest.mark.parametrize("assignment", ["training.steps=true", "training.seed=false", "data.path=true"])
def test_truth_is_taken_for_no_number_and_no_text(assignment: str) -> None:
    assert "this setting is neither true nor false" in refused(assignment)


@pytest.mark.parametrize("value", ["0", "1.5", "whole"])
def test_turns_are_steps_auto_or_null(value: str) -> None:
    said = f"'compare.turns' was given {value if value != 'whole' else repr(value)}"
    allowed = "give the steps of a turn, auto: the harness decides, or null: each cell runs whole"
    assert f"{said}: {allowed}" in refused(f"compare.turns={value}")
    for given, turns in (("3", 3), ("auto", "auto"), ("null", None)):
        assert load_experiment(None, [f"compare.turns={given}"]).compare.turns == turns


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "12:30"])
def test_set_reads_text_that_only_yaml_1_1_takes_for_a_truth_or_a_number(text: str) -> None:
    assert load_experiment(None, [f"data.path={text}", "data.source=text"]).data.path == text


def test_number_that_is_not_finite_is_refused() -> None:
    message = refused("optimizer.learning_rate=inf")
    assert "'optimizer.learning_rate' was given" in message
    assert "finite" in message


def test_set_with_bad_yaml_is_refused() -> None:
    assert "--set model.config is not valid YAML" in refused("model.config={hidden_size: 32")


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5GiB", 3 * 2**29), ("4096", 4096), ("2 kb", 2000)]
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert load_experiment(None, [f"runtime.memory_limit={text}"]).runtime.memory_limit == size


@pytest.mark.parametrize("text", ["much", "0", "-3", "GB", "true"])
def test_what_is_no_size_is_refused(text: str) -> None:
    assert "runtime.memory_limit" in refused(f"runtime.memory_limit={text}")


@pytest.mark.parametrize(
    "setting", ["training.gradient_clipping", "training.steps", "model.name", "data.path", "model.dropout"]
)
@pytest.mark.parametrize("word", ["none", "None"])
def test_none_is_refused_with_the_word_for_no_value(setting: str, word: str) -> None:
    assert refused(f"{setting}={word}") == f"'{setting}' was given '{word}': write null for no value"
