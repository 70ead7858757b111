import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness.files import process_namespace, scratch_folder


def test_folder_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os\nfrom harness.files import scratch_folder\n"
        "with scratch_folder('check') as folder:\n    (folder / 'log').touch()\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=False)
    (left,) = tmp_path.iterdir()
    mine = tmp_path / f"harness-check-{process_namespace()}-{os.getpid()}-living"
    others = tmp_path / "harness-of-somebody-else"
    of_another_container = tmp_path / left.name.replace(process_namespace(), "1")
    for folder in (mine, others, of_another_container):
        folder.mkdir()
    with scratch_folder("doctor") as folder:
        assert not left.exists()
        assert folder.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted([mine, others, of_another_container])


@pytest.mark.parametrize(("ending", "left"), [("", 0), ("os.kill(os.getpid(), 9)", 1)])
def test_sockets_of_multiprocessing_are_removed_too(ending: str, left: int) -> None:
    """Pytest's folders are too long for sockets, so this looks into the usual place."""
    code = (
        "import os\nfrom multiprocessing import util\n"
        "from harness.files import name_multiprocessing_folder\n"
        f"name_multiprocessing_folder()\nprint(util.get_temp_dir(), flush=True)\n{ending}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    folder = Path(done.stdout.strip()).parent
    assert folder.name.startswith("harness-mp-")
    assert folder.exists() == bool(left)
    with scratch_folder("check"):
        assert not folder.exists()
