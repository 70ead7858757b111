"""Values of settings as `--set` and files write them."""

from pathlib import Path

import pytest

from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from tests.harness.job.refusals import refused


def test_no_file_and_no_assignment_is_the_default_job() -> None:
    assert load_experiment(None) == Experiment()


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("optimizer.learning_rate=1e-3", 1e-3),
        ("optimizer.learning_rate=1E-3", 1e-3),
        ("optimizer.learning_rate=0.002", 0.002),
        ("optimizer.learning_rate=1", 1.0),
        ("training.gradient_clipping=null", None),
        ("model.config={hidden_size: 32, num_hidden_layers: 2}", {"hidden_size": 32, "num_hidden_layers": 2}),
        ("model.config={rms_norm_eps: 1e-5}", {"rms_norm_eps": 1e-5}),
        ("compare.backends=[ddp, zero1]", ["ddp", "zero1"]),
        ("data.shuffle=false", False),
        ("runtime.memory_limit=2GB", 2 * 10**9),
        ("runtime.memory_limit=1.5GiB", 3 * 2**29),
        ("runtime.memory_limit=4096", 4096),
        ("runtime.memory_limit=2 kb", 2000),
        *((f"data.path={text}", text) for text in ("yes", "no", "on", "off", "12:30")),  # of YAML 1.1
    ],
)
def test_set_reads_values_as_a_person_writes_them(assignment: str, value: object) -> None:
    name, _, _ = assignment.partition("=")
    section, key = name.split(".")
    needed = ["data.source=text"] if name == "data.path" else []
    found = getattr(getattr(load_experiment(None, [assignment, *needed]), section), key)
    assert (found, type(found)) == (value, type(value))


def test_set_reaches_into_the_model_configuration() -> None:
    experiment = load_experiment(None, ["model.config.hidden_size=64", "model.config.num_hidden_layers=1"])
    assert experiment.model.config == {"hidden_size": 64, "num_hidden_layers": 1}


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


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["training.steps=3", "training.steps.more=1"], ["'steps' is a value (3), not a section"]),
        (
            ["schedule=3"],
            ["'schedule' was given 3; it is a section with kind, warmup_steps, final_fraction"],
        ),
        (["optimizer.learning_rate=inf"], ["'optimizer.learning_rate' was given", "finite"]),
        (["model.config={hidden_size: 32"], ["--set model.config is not valid YAML"]),
        *(
            ([f"{name}"], ["is neither true nor false"])
            for name in ("training.steps=true", "training.seed=false", "data.path=true")
        ),
        *(
            ([f"runtime.memory_limit={text}"], ["runtime.memory_limit"])
            for text in ("much", "0", "-3", "GB", "true")
        ),
    ],
)
def test_what_a_setting_cannot_be_is_refused(assignments: list[str], said: list[str]) -> None:
    message = refused(*assignments)
    assert all(words in message for words in said), message


@pytest.mark.parametrize("value", ["0", "1.5", "whole"])
def test_turns_are_steps_auto_or_null(value: str) -> None:
    said = f"'compare.turns' was given {value if value != 'whole' else repr(value)}"
    allowed = "give the steps of a turn, auto: the harness decides, or null: each cell runs whole"
    assert f"{said}: {allowed}" in refused(f"compare.turns={value}")
    for given, turns in (("3", 3), ("auto", "auto"), ("null", None)):
        assert load_experiment(None, [f"compare.turns={given}"]).compare.turns == turns


@pytest.mark.parametrize(
    "setting", ["training.gradient_clipping", "training.steps", "model.name", "data.path", "model.dropout"]
)
@pytest.mark.parametrize("word", ["none", "None"])
def test_none_is_refused_with_the_word_for_no_value(setting: str, word: str) -> None:
    assert refused(f"{setting}={word}") == f"'{setting}' was given '{word}': write null for no value"
