"""The progress of a portable checkpoint, whole and damaged."""

from dataclasses import asdict
from json import dumps
from pathlib import Path

import pytest

from harness.backends.checkpoints.tensor_files import PROGRESS, read_progress
from harness.backends.piece import OptimizerProgress


@pytest.mark.parametrize(
    "progress", [OptimizerProgress(updates=3), OptimizerProgress(updates=0, loss_scale=8.0, clean_steps=2)]
)
def test_what_was_saved_is_read(progress: OptimizerProgress, tmp_path: Path) -> None:
    (tmp_path / PROGRESS).write_text(dumps(asdict(progress)))
    assert read_progress(tmp_path / PROGRESS) == progress


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"), ("", "Invalid JSON"), ('{"updates": 3', "Invalid JSON"), ("[]", "object"),
        ("null", "object"), ("{}", "updates Field required"), ('{"updates": "x"}', "updates Input should be"),
        ('{"updates": 1, "loss_scale": []}', "loss_scale Input should be"), (b"\xff\xfe", "Invalid JSON"),
    ],
)  # fmt: skip
def test_damage_is_one_line_that_names_the_file(
    text: str | bytes | None, reason: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / PROGRESS).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=r"progress\.json' is damaged or incomplete") as raised:
        read_progress(tmp_path / PROGRESS)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
