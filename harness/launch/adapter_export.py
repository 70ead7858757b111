"""Has a process that loads torch and peft export the adapters of a checkpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from harness.errors import HarnessError
from harness.import_path import module_command, safe_environment
from harness.run_directory.checkpoint import DESCRIPTION
from harness.run_directory.request import checkpoint_folder


def export_adapter(run: Path, output: Path, *, merged: bool) -> int:
    """Write the files to `output`; the number of adapted layers. run: a run's folder, or its checkpoint.

    Raises HarnessError where there is no checkpoint with adapters.
    """
    folder = run if (run / DESCRIPTION).exists() else checkpoint_folder(run)
    if not (folder / DESCRIPTION).exists():
        raise HarnessError(
            f"'{run}' has no checkpoint; run with measure.checkpoint=neutral and measure.keep_checkpoint=true"
        )
    request = {"checkpoint": str(folder), "output": str(output), "merged": merged}
    command = module_command("harness.rank.models.adapter_export")
    done = subprocess.run(
        command,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env=safe_environment(),
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise HarnessError("".join(last) or "exporting the adapters failed without a word")
    return int(done.stdout)
