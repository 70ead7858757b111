"""What modules do not load; `lint-imports` holds the directions of imports (pyproject.toml)."""

import subprocess
import sys

import pytest

from harness.cli import COMMANDS

WITHOUT_TORCH = [
    "harness.api.runs",
    "harness.job.batch", "harness.launch.cells", "harness.cli", *(f"harness.cli.{name}" for name in COMMANDS),
    "harness.judge.comparison",
    "harness.judge.findings.catalogue", "harness.judge.measures", "harness.judge.parity",
    "harness.judge.rows", "harness.job.config", "harness.run_directory.assemble", "harness.launch.launcher",
    "harness.record.provenance", "harness.record", "harness.tell.report", "harness.tell.pictures.drawing",
    "harness.tell.tables", "harness.launch.launcher", "harness.job", "harness.record.store",
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
