"""What failures are called where libraries do not say it."""

from collections import namedtuple
from pathlib import Path

import pytest

from harness.safe_text import described
from harness.worker import failure_words
from harness.worker.failure_words import failure_message

Usage = namedtuple("Usage", "free")
TORCH_SAVE = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 0")


def test_a_quoted_traceback_shrinks_to_its_ends() -> None:
    error = RuntimeError(
        "CheckpointException ranks:dict_keys([0])\nTraceback (most recent call last): (RANK 0)\n"
        "  File \"a.py\", line 1, in f\n    g()\nPermissionError: [Errno 13] Permission denied: 'x'\n"
    )
    said = "CheckpointException ranks:dict_keys([0]) ... PermissionError: [Errno 13] Permission denied: 'x'"
    assert described(error) == said


@pytest.mark.parametrize(("free", "said"), [(0, True), (2**30, False)])
def test_a_file_cut_short_on_a_full_disk_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: bool
) -> None:
    monkeypatch.setattr(failure_words.shutil, "disk_usage", lambda _: Usage(free))
    text = failure_message(TORCH_SAVE, tmp_path)
    assert ("No space left on device" in text) == said
    assert str(TORCH_SAVE) in text
