"""What failures are called where libraries do not say it."""

from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.rank import failure_words
from harness.rank.failure_words import failure_message, note_parameters
from harness.safe_text import described

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


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 1)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "fully_shard doesn't support scalar parameters. Change",
            "parameter 'scale' has no dimension",
        ),
        ("self.dim() cannot be 0 to view Float as Byte", "parameter 'scale' has no dimension"),
        ("got [0] but expected shape compatible with [1, 32]", "reads parameter 'first.weight', of which"),
        (
            "aten.x got mixed torch.Tensor and DTensor, need",
            "reads parameter 'first.weight', 'first.bias', of which",
        ),
    ],
)
def test_words_about_a_parameter_name_it_and_say_what_to_do(words: str, told: str, tmp_path: Path) -> None:
    note_parameters(Scaled())
    message = failure_message(RuntimeError(words), tmp_path)
    assert told in message
    assert message.endswith(f"({words})")
    assert "or run ddp" in message
