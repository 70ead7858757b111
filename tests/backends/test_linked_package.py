"""Where the adapters are imported from: `harness.backends`, whatever the working directory holds."""

import subprocess
import sys
from pathlib import Path

from tests.plugins import register

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, cwd: Path, plugins: bool = False) -> subprocess.CompletedProcess[str]:
    """A process with this checkout on its path; with plugins, the working directory too."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{cwd}" if plugins else str(ROOT)},
    )  # fmt: skip


def test_a_folder_named_backends_in_the_working_directory_does_not_shadow_ours(tmp_path: Path) -> None:
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    done = python("-m", "harness", "backends", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "zero3" in done.stdout


def test_a_plugin_that_exits_when_it_is_imported_does_not_end_the_list_of_backends(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("raise SystemExit(7)\n")
    register(tmp_path, {"own": "plugin:Own"})
    done = python("-m", "harness", "backends", "--json", cwd=tmp_path, plugins=True)
    assert done.returncode == 0, done.stderr
    assert "backend 'own' (plugin:Own) cannot be loaded: SystemExit: 7" in done.stdout
