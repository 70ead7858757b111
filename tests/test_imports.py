"""What modules do not load; `lint-imports` holds the directions of imports (pyproject.toml)."""

import subprocess
import sys

import pytest

from harness.cli import COMMANDS, MODULES

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
