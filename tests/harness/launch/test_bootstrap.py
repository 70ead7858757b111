"""What every Python process of an observed command loads first."""

import os
import subprocess
import sys
from importlib.machinery import all_suffixes
from pathlib import Path

import pytest

from harness.job.experiment import MeasureSection
from harness.launch.bootstrap.sitecustomize import PACKAGES, _modules_in
from harness.launch.observed_command import observed_environment
from harness.run_directory.observed_record import ObserveRequest, assemble_observed, processes_folder


def run(folder: Path, script: str, *paths: Path) -> str:
    """Standard output of a process that is started as one of an observed command."""
    environment = observed_environment(folder)
    bootstrap, *rest = environment["PYTHONPATH"].split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([bootstrap, *map(str, paths), *rest])
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_sitecustomize_of_the_environment_is_loaded_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.own_was_loaded = True\n")
    assert run(tmp_path, "print(own_was_loaded)", tmp_path) == "True"


def test_a_process_without_torch_loads_nothing_of_the_harness(tmp_path: Path) -> None:
    loaded = "import sys; print(sorted(name for name in sys.modules if name.startswith('harness')))"
    assert run(tmp_path, loaded) == "[]"


def test_a_module_that_is_half_imported_is_told_of_at_its_end(tmp_path: Path) -> None:
    """accelerate.accelerator imports torch, which asks to be told of accelerate.accelerator."""
    package = tmp_path / "accelerate"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("accelerator.py").write_text("import asks\nclass Accelerator: pass\n")
    (tmp_path / "asks.py").write_text(
        "import sys\n"
        "seen = []\n"
        "finder, = (f for f in sys.meta_path if type(f).__name__ == 'AfterImport')\n"
        "finder.on_import('accelerate.accelerator', lambda module: seen.append(module.Accelerator))\n"
        "assert not seen\n"
    )
    assert run(tmp_path, "import accelerate.accelerator, asks; print(len(asks.seen))", tmp_path) == "1"


def test_a_framework_that_cannot_be_hooked_is_imported_all_the_same(tmp_path: Path) -> None:
    package = tmp_path / "accelerate"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("accelerator.py").touch()
    script = (
        "import sys\n"
        "finder, = (f for f in sys.meta_path if type(f).__name__ == 'AfterImport')\n"
        "finder.on_import('accelerate.accelerator', lambda module: module.Accelerator)\n"
        "import accelerate.accelerator; print('imported')"
    )
    assert run(tmp_path, script, tmp_path) == "imported"


OWN = {
    "harness/__init__.py": "mine = 1",
    "harness/rank.py": "",
    "psutil.py": "raise SystemExit(7)",
    "pydantic.py": "ran = True",
    "datasets/rows.txt": "no package: that of the environment is imported",
    "train.py": """
import pydantic, torch, harness, pydantic as again
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
import datasets
try:
    import psutil
except SystemExit as end:
    print(end)
print(harness.mine, pydantic.ran, again is pydantic, bool(datasets.__file__))
""",
}


@pytest.mark.costly
def test_modules_of_the_scripts_folder_are_the_scripts_alone(tmp_path: Path) -> None:
    """Names that the harness imports too; psutil, whose own would end the process, looks for itself."""
    run_directory, folder = tmp_path / "run", tmp_path / "script"
    run_directory.mkdir()
    request = ObserveRequest(
        run_id="observed", created_at="2026-01-01T00:00:00.000+00:00", command=["harness"], observed=["x"],
        measure=MeasureSection(warmup_steps=0, probed_steps=1, cooldown_steps=0, traced_steps=0),
    )  # fmt: skip
    request.write(run_directory)
    for name, text in OWN.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    environment = observed_environment(run_directory)
    environment["PYTHONPATH"] += os.pathsep + str(folder)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("7\n1 True True True\n", "", 0)
    record = assemble_observed(run_directory, request, done.returncode)
    assert (record.status, len(record.steps), record.observation.notes) == ("ok", 3, [])


@pytest.mark.costly
def test_a_script_beside_the_harness_is_observed(tmp_path: Path) -> None:
    """As `python -m` in a clone, from an environment into which the harness is not installed."""
    ObserveRequest(
        run_id="observed", created_at="2026-01-01T00:00:00.000+00:00", command=["harness"], observed=["x"],
        measure=MeasureSection(traced_steps=0),
    ).write(tmp_path)  # fmt: skip
    environment = observed_environment(tmp_path)
    script = (
        "import sys\n"
        "sys.meta_path[:] = [found for found in sys.meta_path if 'ditable' not in repr(found)]\n"
        f"sys.path.insert(0, {environment[PACKAGES]!r})\n"
        "import torch\n"
        "print(torch.autograd.backward.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.stderr, done.returncode) == ("", 0)
    assert len(list(processes_folder(tmp_path).iterdir())) == 1


def test_of_a_folder_of_data_only_what_python_imports_is_looked_up(tmp_path: Path) -> None:
    for name in ("random.py", "image1.png", "table.csv", "numpy", f"fast{all_suffixes()[-1]}"):
        (tmp_path / name).touch()
    assert _modules_in(str(tmp_path)) >= {"random", "numpy", "fast"}
    assert not {"image1", "table"} & _modules_in(str(tmp_path))
