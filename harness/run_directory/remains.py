"""Removes the large files of ranks that ended before they could."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.run_directory.request import RunRequest, checkpoint_folder, weights_folder


def remove_remains(run_directory: Path, request: RunRequest) -> None:
    """Remove initial weights, and a checkpoint that was not to be kept. The ranks have ended."""
    shutil.rmtree(weights_folder(run_directory), ignore_errors=True)
    if not request.measure.keep_checkpoint:
        shutil.rmtree(checkpoint_folder(run_directory), ignore_errors=True)
