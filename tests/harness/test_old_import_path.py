"""Where the adapters are imported from: `harness.backends`, whatever the working directory holds."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A process with this checkout behind its working directory."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
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
