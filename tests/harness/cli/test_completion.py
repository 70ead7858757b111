"""What a shell offers, asked as bash asks."""

import subprocess
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli import harness
from tests.harness.cli.command_line import HARNESS, environment
from tests.patience import SECONDS


def asked(line: str) -> dict[str, str]:
    """What bash sets to ask for words in place of the last one of a line, which may be unfinished."""
    return {
        "_HARNESS_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")),
    }  # fmt: skip


def words_of(printed: str) -> list[str]:
    return [text.partition(",")[2] for text in printed.splitlines()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("harness com", ["compare"]),
        ("harness run --backend zero", ["zero0", "zero1", "zero2", "zero3"]),
        ("harness run --backend zero3:off", ["zero3:offload="]),
        ("harness compare --backends ddp,fsdp-h", ["ddp,fsdp-hybrid"]),
        ("harness compare --set training.pre", ["training.precision="]),
        ("harness compare --set schedule.kind=c", ["schedule.kind=constant", "schedule.kind=cosine"]),
        ("harness compare --config @mem", ["@memory-bloom", "@memory-llama"]),
        ("harness explain gradient-s", ["gradient-scale"]),
        ("harness settings tr", ["training"]),
    ],
)  # fmt: skip
def test_the_shell_offers_what_the_harness_knows(tmp_path: Path, line: str, words: list[str]) -> None:
    with chdir(tmp_path):
        done = CliRunner().invoke(harness, [], prog_name="harness", env=asked(line))
    assert words_of(done.stdout) == words


def test_runs_are_offered_by_name(tmp_path: Path) -> None:
    """By the command as bash starts it."""
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "record.json").touch()
    done = subprocess.run(
        HARNESS, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=True,
        env=environment(**asked("harness show o")),
    )  # fmt: skip
    assert words_of(done.stdout) == ["one"]
