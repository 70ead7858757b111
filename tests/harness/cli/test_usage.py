"""What the commands have in common: usage errors, tracebacks, the folder of runs."""

import shlex
from pathlib import Path

import pytest

from . import command_line
from .command_line import environment, harness, harness_process, refused


@pytest.mark.parametrize(
    "arguments",
    [["run", "--backend", "ddp", "--nproc", "0"], ["run"], ["run", "--backend", "ddp", "--port", "70000"],
     ["report"], ["nonsense"]],
    ids=" ".join,
)  # fmt: skip
def test_usage_error_exits_with_two(tmp_path: Path, arguments: list[str]) -> None:
    done = harness(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["run", "compare"])
def test_runs_folder_below_a_file(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    what = ["--backend", "ddp"] if command == "run" else ["--backends", "ddp"]
    line = refused(tmp_path, command, *what, "--runs", "file/runs")
    assert "runs folder 'file/runs' cannot be written" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # Of a run without a network: tests/harness/cli/test_run.py.
        pytest.param(
            "run --backend ddp --set data.sequence_length=1024",
            "longer than the model's context",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "compare --backends ddp,zero1 --nproc 2 --set 'model.config={model_type: bert}'",
            "not a causal",
            marks=pytest.mark.exhaustive,
        ),
        ("report none -o report.md", "holds no record"),
    ],
)
def test_a_process_of_its_own_writes_one_line_too(tmp_path: Path, arguments: str, said: str) -> None:
    """Whatever its fork server and its libraries would write beside it."""
    words = shlex.split(arguments)
    assert said in refused(tmp_path, *words, HF_HUB_OFFLINE="1")


@pytest.mark.parametrize(
    "words",
    ["list --runs nosuch", "show --runs nosuch", "verify nosuch.md", "report nosuch -o x.md",
     "explain nosuch", "diagnose nosuch other", "compare --backends nosuch", "run --backend nosuch",
     "settings nosuch", "estimate --gpu nosuch", "clean --runs nosuch"],
)  # fmt: skip
@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}])
def test_an_error_is_shown_whatever_rank_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, variables: dict[str, str]
) -> None:
    monkeypatch.setattr(command_line, "environment", lambda: {**environment(), **variables})
    assert "nosuch" in refused(tmp_path, *words.split())


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = harness_process("--debug", "run", "--backend", "zerro3", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "backend 'zerro3' is unknown" in done.stderr


def test_files_in_the_folder_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"mine")
    assert "'out' exists and is not empty" in refused(tmp_path, "export", "adapter", "run", "-o", "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"mine"
