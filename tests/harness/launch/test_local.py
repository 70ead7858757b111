"""What the launcher of one machine leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config import load_experiment

KEEP_AND_END = """
import sys
from harness.launch.local import LocalLauncher

if __name__ == "__main__":
    launcher = LocalLauncher("cpu")
    print(launcher.check(sys.argv[1], keep=True)["architecture"])
    print(launcher._kept[0].pid)
"""


def test_a_kept_process_that_no_run_took_ends_with_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "keep.py"
    script.write_text(KEEP_AND_END)
    job = load_experiment(None, ["training.global_batch_size=8"]).job().model_dump_json()
    done = subprocess.run(
        [sys.executable, script, job], capture_output=True, text=True, timeout=120, check=True
    )
    architecture, pid = done.stdout.split()
    assert architecture == "LlamaForCausalLM"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
