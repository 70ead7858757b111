"""What an installation brings, what modules do not load, and how long files are."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from harness.cli import COMMANDS, MODULES
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


CLI = {f"harness.cli.{MODULES.get(name, name).partition(':')[0]}" for name in COMMANDS}

WITHOUT_TORCH = [
    "harness.api",
    "harness.job.batch", "harness.launch.cells", "harness.cli", *sorted(CLI),
    "harness.judge.comparison", "harness.judge.quantities", "harness.judge.agreement.parity",
    "harness.judge.rows", "harness.job.config", "harness.run_directory.assemble", "harness.launch.launcher",
    "harness.record.provenance", "harness.record", "harness.tell.report", "harness.tell.pictures.drawing",
    "harness.tell.tables", "harness.launch.launcher", "harness.job", "harness.record.store",
    "harness.forms.families",
    "harness.backends.base", "backends.options", "backends.registry",
]  # fmt: skip


SCRIPT = """
import importlib, sys
loaded = {}
for module in sys.argv[2].split(","):
    importlib.import_module(module)
    for library in {*sys.argv[1].split(",")} & {*sys.modules} - {*loaded}:
        loaded[library] = module
print(loaded)
"""


@pytest.mark.parametrize(
    ("libraries", "modules"),
    [
        ("torch,transformers,deepspeed,accelerate", WITHOUT_TORCH),
        ("transformers,deepspeed,accelerate", ["harness.rank.observing.session"]),
    ],
    ids=["without-torch", "observed-process"],
)
def test_modules_load_without(libraries: str, modules: list[str]) -> None:
    """One after the other in one process: the first to load a library is named."""
    words = [sys.executable, "-c", SCRIPT, libraries, ",".join(modules)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{}"


CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PINNED = re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
OLDEST = "3.11.2"
"""Debian 12's; `requires-python` says 3.11."""


@pytest.mark.parametrize("name", PINNED)
def test_a_pinned_version_takes_the_oldest_python(name: str) -> None:
    try:
        required = distribution(name).metadata.get("Requires-Python") or ""
    except PackageNotFoundError:
        pytest.skip("not installed: this environment leaves an extra out, or is another system's")
    assert OLDEST in SpecifierSet(required), f"{name} needs Python {required}: pin an older version"


LONGEST_FILE = 1200
LONGEST_FUNCTION = 80
SOURCES = [*sorted((ROOT / "backends").rglob("*.py")), *sorted((ROOT / "harness").rglob("*.py"))]


def test_no_source_file_is_longer_than_1200_lines() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > LONGEST_FILE} == {}


def test_no_function_is_longer_than_80_lines() -> None:
    lengths = {name: length for path in SOURCES for name, length in functions(path)}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function and method of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.name}", (node.end_lineno or 0) - node.lineno + 1
