"""What an installation brings."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.representatives import first

BUILD = "from setuptools import setup; setup()"


SHIPPED = {
    "backends/": "harness/backends/", "configs/": "harness/shipped/configs/",
    "slurm/sites/": "harness/shipped/sites/", "harness/": "harness/",
}  # fmt: skip
"""Folders of the checkout, and where they lie in an installation."""
FEW = [["compare", "--config", "@default", "--dry-run"], ["labs", "table", "fsdp-lecture"]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built outside of the checkout."""
    made = tmp_path_factory.mktemp("wheel")
    words = ["egg_info", "--egg-base", made, "build", "--build-base", made / "b", "bdist_wheel", "-d", made]
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = made.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_marker_of_types_is_shipped(names: set[str]) -> None:
    assert "harness/py.typed" in names


def test_the_pages_of_explain_are_shipped(names: set[str]) -> None:
    assert {"harness/judge/findings.toml", "harness/cli/glossary.md"} <= names


def test_every_file_of_the_packages_is_shipped(names: set[str]) -> None:
    """Sources, configurations with their data, sites, catalogues, templates."""
    words = ["git", "ls-files", *SHIPPED]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.splitlines() if not (ROOT / name).is_symlink()]
    expected = {
        shipped + name.removeprefix(folder)
        for name in files
        for folder, shipped in SHIPPED.items()
        if name.startswith(folder) and not name.endswith("README.md")
    }
    assert len(expected) > 300
    assert expected - names == set()


@pytest.mark.parametrize(
    "words",
    first(FEW, [
        *FEW, ["explain", "gradient-scale"], ["compare", "--config", "@labs/tiny/bloom-fsdp", "--dry-run"],
    ]),
    ids=" ".join,
)  # fmt: skip
def test_an_installation_works_from_an_empty_folder(words: list[str], wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = (
        "import harness, sys; from harness.cli import main; print(harness.__file__, file=sys.stderr); main()"
    )
    libraries = sysconfig.get_path("purelib")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), libraries])}
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{code}; main()", *words], cwd=tmp_path / "empty", env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(str(installed))
    assert done.stdout.strip()
    assert [*(tmp_path / "empty").iterdir()] == []
