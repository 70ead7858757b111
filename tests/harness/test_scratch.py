import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness.scratch import scratch_folder


def test_folder_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os\nfrom harness.scratch import scratch_folder\n"
        "with scratch_folder('check') as folder:\n    (folder / 'log').touch()\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    (left,) = tmp_path.iterdir()
    mine = tmp_path / f"harness-check-{os.getpid()}-living"
    others = tmp_path / "harness-of-somebody-else"
    for folder in (mine, others):
        folder.mkdir()
    with scratch_folder("doctor") as folder:
        assert not left.exists()
        assert folder.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted([mine, others])
