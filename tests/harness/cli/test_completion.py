"""What a shell offers, asked as bash asks."""

import subprocess
from pathlib import Path

import pytest

from tests.harness.cli.command_line import HARNESS, environment


def offered(folder: Path, line: str) -> list[str]:
    """Words for the last one of a line, which may be unfinished."""
    words = line.split(" ")
    done = subprocess.run(
        HARNESS, cwd=folder, capture_output=True, text=True, timeout=60, check=True,
        env=environment(
            _HARNESS_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)
        ),
    )  # fmt: skip
    return [text.partition(",")[2] for text in done.stdout.splitlines()]


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
    assert offered(tmp_path, line) == words


def test_runs_are_offered_by_name(tmp_path: Path) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "record.json").touch()
    assert offered(tmp_path, "harness show o") == ["one"]
