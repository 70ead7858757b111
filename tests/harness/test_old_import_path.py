"""Where the adapters are imported from: `harness.backends`, whatever the working directory holds."""

import json
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


def test_the_old_import_path_gives_the_same_classes_and_warns_once(tmp_path: Path) -> None:
    script = (
        "from backends.base import Backend; import backends.registry, harness.backends.base as new; "
        "print(Backend is new.Backend, backends.registry.__name__, new.__spec__.name)"
    )
    done = python("-c", script, cwd=tmp_path)
    assert done.stdout.split() == ["True", "harness.backends.registry", "harness.backends.base"]
    assert done.stderr.count("FutureWarning") == 1


def test_the_old_import_path_works_in_the_repository_too() -> None:
    done = python(
        "-c", "import backends.ddp, harness.backends.ddp as new; print(backends.ddp is new)", cwd=ROOT
    )
    assert done.stdout.strip() == "True", done.stderr


def test_a_plugin_on_the_old_path_is_refused_by_one_line_where_a_folder_shadows_it(tmp_path: Path) -> None:
    own = tmp_path / "backends" / "__init__.py"
    own.parent.mkdir()
    own.touch()
    (tmp_path / "plugin.py").write_text("from backends.base import Backend\nclass Own(Backend): ...\n")
    register(tmp_path, {"own": "plugin:Own"})
    done = python("-m", "harness", "backends", "--json", cwd=tmp_path, plugins=True)
    assert done.returncode == 0, done.stderr
    (listed,) = (entry for entry in json.loads(done.stdout)["backends"] if entry["name"] == "own")
    assert listed["summary"] == (
        "backend 'own' (plugin:Own) cannot be loaded: it imports 'backends', the former path of "
        f"harness.backends, and found {own} instead; import harness.backends there, or start in another "
        "folder"
    )
    own.write_text("raise RuntimeError('not ours')\n")
    done = python("-m", "harness", "run", "--backend", "own", cwd=tmp_path, plugins=True)
    assert done.returncode == 1
    assert f"found {own} instead" in done.stderr


def test_a_plugin_that_exits_when_it_is_imported_does_not_end_the_list_of_backends(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("raise SystemExit(7)\n")
    register(tmp_path, {"own": "plugin:Own"})
    done = python("-m", "harness", "backends", "--json", cwd=tmp_path, plugins=True)
    assert done.returncode == 0, done.stderr
    assert "backend 'own' (plugin:Own) cannot be loaded: SystemExit: 7" in done.stdout
