"""Which way imports go, and what the command line does not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_TORCH = [
    "harness.batch", "harness.cells", "harness.cli", "harness.cli.backends", "harness.cli.compare",
    "harness.cli.run", "harness.cli.report", "harness.cli.verify", "harness.compare.comparison",
    "harness.compare.findings.catalogue", "harness.compare.measures", "harness.compare.parity",
    "harness.compare.rows", "harness.config", "harness.launch.assemble", "harness.launch.local",
    "harness.provenance", "harness.record", "harness.report.report", "harness.report.drawing",
    "harness.report.tables", "harness.cli.slurm", "harness.spec", "harness.store",
    "harness.theory.families",
    "harness.backends.base", "backends.options", "backends.registry",
]  # fmt: skip


def imported(path: Path) -> set[str]:
    """Top-level packages that a source file imports, wherever in it; of our own with the part below."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {_package(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(_package(node.module))
    return found


def _package(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2] if parts[0] == "harness" else parts[:1])


@pytest.mark.parametrize(
    "path", sorted((ROOT / "backends").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_backends_never_import_the_harness(path: Path) -> None:
    ours = {name for name in imported(path) if name.startswith("harness")}
    assert ours <= {"harness.backends", "harness.old_import_path"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_module_loads_without_torch(module: str) -> None:
    script = (
        f"import sys, {module}; print(sorted({{'torch', 'transformers', 'deepspeed'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["compare", "report", "theory"])
def test_pure_packages_name_no_library_of_the_ranks(name: str) -> None:
    for path in (ROOT / "harness" / name).rglob("*.py"):
        assert not imported(path) & {"torch", "transformers", "deepspeed", "accelerate"}, path
