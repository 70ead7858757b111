"""Of the ranks that torchrun starts on a node, the first reads the files of the job."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

from harness.cli import harness as command
from harness.errors import HarnessError
from harness.launch import cells

run = importlib.import_module("harness.cli.run")


def rank(rank: int, local_rank: int, text: Path, folder: Path) -> Result:
    """`harness run` as this rank of four on two nodes, up to where the ranks meet."""
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9",
    }  # fmt: skip
    data = ["--set", "data.source=text", "--set", f"data.path={text}", "--set", "runtime.device=cpu"]
    words = ["run", "--backend", "ddp", "--runs", str(folder / "runs"), *data]
    return CliRunner().invoke(command, words, env=variables)


@pytest.mark.parametrize(("number", "local_rank", "count"), [(0, 0, 1), (1, 1, 0), (2, 0, 1), (3, 1, 0)])
def test_the_first_rank_of_a_node_alone_reads_them(
    number: int, local_rank: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A few words. " * 50)
    read: list[Path] = []
    monkeypatch.setattr(cells, "content_digest", lambda path: read.append(path) or "sha256:0")
    monkeypatch.setattr(run, "refuse_as_rank", lambda *_, **__: None)
    met: list[int] = []

    def meet(own_rank: int, *_: object) -> NoReturn:
        met.append(own_rank)
        raise HarnessError("no rank is met here")

    monkeypatch.setattr(run, "supervise", meet)
    result = rank(number, local_rank, text, tmp_path)
    assert met == [number], result.output
    assert read == [text] * count


@pytest.mark.parametrize("local_rank", [0, 1])
def test_every_rank_refuses_a_missing_file_before_it_forks(
    local_rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "supervise", lambda *_: pytest.fail("forked"))
    result = rank(local_rank, local_rank, tmp_path / "missing.txt", tmp_path)
    assert result.exit_code == 1
    assert ("missing.txt" in result.output) == (local_rank == 0)  # others are silent
