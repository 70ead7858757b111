"""Commands that start no ranks, in a process that cannot import the training libraries."""

import json
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from tests.docs.markdown import ROOT

from .command_line import environment

RECORDS = ROOT / "reports" / "traps" / "1-rank"
BLOCKED = (
    "torch", "transformers", "deepspeed", "accelerate", "datasets", "peft", "torchmetrics", "torchao",
    "bitsandbytes", "safetensors", "tokenizers", "huggingface_hub", "lightning", "pandas", "matplotlib",
)  # fmt: skip
SCRIPT = """
import importlib.metadata as metadata, json, sys
blocked = set(json.loads(sys.argv[1]))
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
found = metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name.lower() in blocked:
        raise metadata.PackageNotFoundError(name)
    return found(cls, name)
metadata.Distribution.from_name = classmethod(from_name)
from click.testing import CliRunner
from harness.cli import harness
results = []
for words in json.loads(sys.argv[2]):
    sys.argv = ["harness", *words]
    done = CliRunner().invoke(harness, words, prog_name="harness")
    said = done.stderr if isinstance(done.exception, SystemExit) else done.stderr + repr(done.exception)
    results.append([done.exit_code, done.stdout, said])
print(json.dumps([results, sorted(blocked & set(sys.modules))]))
"""
pytestmark = pytest.mark.long(seconds=10)
NEEDS = "not installed, which {} need: pip install 'sharding-harness[train]'\n"
WORKS = {
    "list": ["list", "--runs", str(RECORDS)],
    "report-md": ["report", str(RECORDS), "-o", "report.md"],
    "report-html": ["report", str(RECORDS), "-o", "report.html"],
    "report-csv": ["report", str(RECORDS), "-o", "report.csv"],
    "report-json": ["report", str(RECORDS), "-o", "report.json"],
    "report-tex": ["report", str(RECORDS), "-o", "report.tex"],
    "verify": ["verify", "report.md"],
    "verify-html": ["verify", "report.html"],
    "backends": ["backends"],
    "backends-json": ["backends", "--json"],
    "settings": ["settings"],
    "explain": ["explain", "gradient-scale"],
    "settings-file": ["settings", "--write", "job.yaml"],
    "labs-list": ["labs", "list"],
    "labs-table": ["labs", "table", "fsdp-lecture"],
    "estimate": ["estimate", "--model", "Qwen3-8B", "--gpu", "A100-80", "--world-size", "8"],
    "estimate-default": ["estimate"],
    "recommend": [
        "recommend", "--model", "Qwen3-8B", "--gpu", "H100-80", "--gpus", "8", "--tokens-per-step", "65536",
    ],
    "dry-run": ["compare", "--config", "@default", "--dry-run"],
    "slurm-render": [
        "slurm", "render", "--site", str(ROOT / "slurm/sites/generic.yaml"), "--backends", "ddp,zero3",
        "--nodes", "1,2", "--nproc", "4", "--runs", "runs", "-o", "jobs",
    ],
    "clean": ["clean", "--runs", str(RECORDS)],
}  # fmt: skip
REFUSED = {
    "run": (["run", "--backend", "ddp"], "ranks"),
    "compare": (["compare", "--backends", "ddp", "--nproc", "2"], "ranks"),
    "doctor": (["doctor"], "ranks"),
    "fabric": (["fabric"], "ranks"),
    "simulate": (["simulate", "--backend", "ddp", "--world-size", "64"], "simulations"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By command: exit code, standard output and standard error; and what was loaded all the same."""
    folder = tmp_path_factory.mktemp("without-torch")
    commands = [*WORKS.values(), *(words for words, _ in REFUSED.values())]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(BLOCKED), json.dumps(commands)],
        cwd=folder, env=environment(PYTHONPATH=str(ROOT), XDG_CACHE_HOME=str(folder / "cache")),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers, loaded = json.loads(done.stdout.splitlines()[-1])
    return {**dict(zip([*WORKS, *REFUSED], answers, strict=True)), "loaded": loaded, "folder": folder}


@pytest.mark.parametrize("name", WORKS)
def test_a_command_without_ranks_needs_no_torch(name: str, results: dict[str, Any]) -> None:
    code, _, said = results[name]
    assert code == 0, said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", REFUSED)
def test_a_command_with_ranks_says_in_one_line_what_to_install(name: str, results: dict[str, Any]) -> None:
    code, _, said = results[name]
    assert code == 1
    assert said.endswith(NEEDS.format(REFUSED[name][1])), said
    assert said.startswith("harness: torch")


def test_nothing_of_them_was_loaded(results: dict[str, Any]) -> None:
    assert results["loaded"] == []
    assert "holds; 3 records unchanged" in results["verify"][1]
    rendered = results["slurm-render"][1] + results["slurm-render"][2]
    assert "6 runs in 6 scripts for CPU ranks: gpus_per_node of site 'generic' is 0" in rendered


def test_the_page_has_the_short_list_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=~]", entry)[0] for entry in project["dependencies"]]
    page = (ROOT / "docs" / "versions.md").read_text()
    between = page.split("<!-- short list -->")[1].split("<!-- end of short list -->")[0]
    assert re.findall(r"`([^`]+)`", between) == names
    extra = {re.split(r"[<>=~]", entry)[0] for entry in project["optional-dependencies"]["train"]}
    assert not extra & set(names)
    assert {"torch", "deepspeed", "transformers", "accelerate", "datasets", "peft"} <= extra
