"""Configuration files: what can be read, and where their paths lead."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from tests.harness.job.refusals import refused_file


def test_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    message = refused_file(tmp_path, "training:\n  steps: 5\n  seed: 1\n  steps: 6\n")
    assert 'line 4: found duplicate key "steps"' in message


def test_bad_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    message = refused_file(tmp_path, "training:\n  steps: [1, 2\n  seed: 0\n")
    assert "is not valid YAML, line" in message
    assert "\n" not in message


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"none\.yaml cannot be read: No such file"):
        load_experiment(tmp_path / "none.yaml")


def test_folder_as_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="cannot be read: Is a directory"):
        load_experiment(tmp_path)


def test_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"training: \xff\xfe\n")
    with pytest.raises(HarnessError, match="is not UTF-8"):
        load_experiment(path)


@pytest.mark.parametrize(("text", "kind"), [("- 1\n- 2\n", "list"), ("hello\n", "str"), ("3\n", "int")])
def test_file_that_holds_no_mapping_is_refused(tmp_path: Path, text: str, kind: str) -> None:
    message = refused_file(tmp_path, text)
    assert f"holds a {kind}; it must be a mapping" in message


@pytest.mark.parametrize(
    ("text", "tool", "option"),
    [("zero_optimization:\n  stage: 2\n", "DeepSpeed", "--from-deepspeed"),
     ("distributed_type: FSDP\n", "Accelerate", "--from-accelerate")],
)  # fmt: skip
def test_a_configuration_of_another_tool_is_known(tmp_path: Path, text: str, tool: str, option: str) -> None:
    message = refused_file(tmp_path, text)
    assert f"so it is one of {tool}: give it with {option}; " in message


def test_empty_file_is_the_default_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("# nothing yet\n")
    assert load_experiment(path) == Experiment()


def test_empty_section_is_the_default_section(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("training:\n  # steps: 20\n")
    assert load_experiment(path) == Experiment()


def test_all_problems_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    message = refused_file(
        tmp_path, "training: {steps: -1, precisions: fp32}\nlr: 3\noptimizer: {beta1: 2}\n"
    )
    assert message.startswith("4 problems: (1) 'optimizer.beta1' was given 2")
    for part in ("(2) 'training.steps' was given -1", "(3) 'training.precisions' is unknown", "(4) 'lr' is"):
        assert part in message
    assert "\n" not in message


def test_paths_of_a_file_count_from_its_folder(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "job.yaml"
    (tmp_path / "jobs" / "model").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("text")
    job.write_text(
        "model: {name: ./model}\ndata: {source: text, path: ../notes.txt, tokenizer: ../tokens/mine}\n"
    )
    read = load_experiment(job)
    assert read.model.name == str(tmp_path / "jobs" / "model")
    assert read.data.path == str(tmp_path / "notes.txt")
    assert read.data.tokenizer == str(tmp_path / "tokens" / "mine")


def test_hub_names_of_a_file_stay_names(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: {name: bigscience/bloom-560m}\ndata: {tokenizer: gpt2}\n")
    read = load_experiment(job)
    assert (read.model.name, read.data.tokenizer) == ("bigscience/bloom-560m", "gpt2")


def test_paths_that_lead_somewhere_from_the_working_directory_alone_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "jobs" / "job.yaml").write_text("data: {source: text, path: ./notes.txt}\n")
    monkeypatch.chdir(tmp_path)
    assert load_experiment(Path("jobs/job.yaml")).data.path == "./notes.txt"


def test_home_folder_is_found_after_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert load_experiment(None, ["model.name=~/model"]).model.name == "/somewhere/model"
