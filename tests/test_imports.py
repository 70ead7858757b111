"""What modules do not load; `lint-imports` holds the directions of imports (pyproject.toml)."""

import subprocess
import sys

import pytest

from harness.cli import COMMANDS

WITHOUT_TORCH = [
    "harness.api.estimates", "harness.api.runs",
    "harness.batch", "harness.cells", "harness.cli", *(f"harness.cli.{name}" for name in COMMANDS),
    "harness.judge.comparison",
    "harness.judge.findings.catalogue", "harness.judge.measures", "harness.judge.parity",
    "harness.judge.rows", "harness.config", "harness.run_directory.assemble", "harness.launch.local",
    "harness.provenance", "harness.record", "harness.tell.report", "harness.tell.pictures.drawing",
    "harness.tell.tables", "harness.launch.cell", "harness.spec", "harness.store",
    "harness.forms.families",
    "harness.backends.base", "backends.options", "backends.registry",
]  # fmt: skip


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_module_loads_without_torch(module: str) -> None:
    script = (
        f"import sys, {module}; print(sorted({{'torch', 'transformers', 'deepspeed'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
