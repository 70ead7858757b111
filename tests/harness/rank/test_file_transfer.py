"""Files of ranks on other nodes reach rank 0 through the store."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.rank import external
from harness.rank.external import fetch, hand_over


def test_files_arrive_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "PIECE_BYTES", 16)  # several pieces
    store = dist.HashStore()
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "rank-00003.jsonl").write_text('{"kind": "step"}\n' * 50 + "\u00e9")
    hand_over(store, 3, [there / "rank-00003.jsonl", there / "node-00001.json"])
    assert fetch(store, 3, here)
    assert (here / "rank-00003.jsonl").read_text() == (there / "rank-00003.jsonl").read_text()
    assert [path.name for path in here.iterdir()] == ["rank-00003.jsonl"]


def test_a_rank_that_died_is_not_waited_for(tmp_path: Path) -> None:
    assert not fetch(dist.HashStore(), 1, tmp_path, timedelta(milliseconds=50))
    assert list(tmp_path.iterdir()) == []
