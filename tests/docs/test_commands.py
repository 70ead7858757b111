"""Commands of the documentation exist, accept their arguments and run; so does its notebook."""

import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import click
import nbformat
import pytest
from nbclient import NotebookClient

from harness import cli
from harness.backends import registry
from harness.cli.options import split_backends
from harness.job.config import load_experiment
from tests import patience
from tests.docs.commands import NOT_RUN, Command, commands, tiny
from tests.docs.markdown import ROOT, tokens
from tests.harness.cli.command_line import SHORT, environment, harness, succeeds
from tests.representatives import EXHAUSTIVE

FOUND = list(commands())
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
NOT_OURS = ("source", "pip", "python3", "/shared/harness/bin/pip")


@pytest.mark.parametrize("command", FOUND, ids=[f"{found.place} {found.text[:40]}" for found in FOUND])
def test_the_command_exists_and_accepts_its_arguments(command: Command) -> None:
    first, *rest = command.words
    given = command.of_harness()
    if given is not None:
        check(given)
    elif first == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS
    elif first == "python":
        name = f"{rest[1].replace('.', '/')}.py" if rest[0] == "-m" else rest[0]
        assert (ROOT / name).is_file()
    else:
        assert first in NOT_OURS


def check(words: list[str]) -> None:
    """Parse the words as the command does, without running it. Raises click's or the harness's error."""
    command: click.Command = cli.harness
    context = click.Context(cli.harness)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    given = command.make_context(command.name, words, parent=context).params
    settings = [text for text in given.get("assignments", ()) if not text.startswith("model.name=")]
    load_experiment(None, [text for text in settings if "tokenizer" not in text])
    named = given.get("backends") or given.get("backend")
    for label in split_backends(named) if named else ():
        if not label.startswith("all-reduce"):
            registry.parse(label)
    config = given.get("config")
    assert config is None or config == Path("my-job.yaml") or (ROOT / config).is_file()


def test_a_wrong_option_or_setting_is_found() -> None:
    with pytest.raises(click.UsageError):
        check(["run", "--backend", "ddp", "--no-such-option"])
    with pytest.raises(Exception, match="unknown"):
        check(["run", "--backend", "ddp", "--set", "training.no_such_setting=1"])
    with pytest.raises(Exception, match="zero4"):
        check(["compare", "--backends", "zero4"])


def test_every_reason_for_not_running_holds_for_a_command() -> None:
    assert [start for start in NOT_RUN if not any(found.text.startswith(start) for found in FOUND)] == []


def test_the_code_on_the_page_of_own_models_is_that_of_its_example() -> None:
    example = (ROOT / "configs/own_model.py").read_text(encoding="utf-8")
    shown = [block.content for block in tokens(ROOT / "docs/your-model.md") if block.info == "python"]
    assert [part for code in shown for part in code.split("\n\n\n") if part not in example] == []
    assert "def model(" in "".join(shown)


RUN = [found for found in commands() if found.not_run() is None]
REFUSED_BY_GATE = 3


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one tiny comparison whose records and report many commands read."""
    made = tmp_path_factory.mktemp("compared")
    succeeds("compare", "--backends", "ddp", *SHORT, "--report", "report.md", cwd=made)
    return made


def checkout(folder: Path, compared: Path) -> None:
    """Fill a folder with what the commands of a file name: files of the repository, a corpus, a job, runs."""
    for name in ("configs", "docs", "slurm", "reports"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "corpus.txt").write_text("A line of a corpus, as long as it must be.\n" * 200, encoding="utf-8")
    job = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    (folder / "my-job.yaml").write_text(job.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    site = (ROOT / "slurm" / "sites" / "generic.yaml").read_text(encoding="utf-8")
    (folder / "my-site.yaml").write_text(
        site.replace("gpus_per_node: 0", "gpus_per_node: 4"), encoding="utf-8"
    )
    shutil.copytree(compared, folder, dirs_exist_ok=True)
    for name in ("old", "new", "runs/before", "runs/after"):
        (folder / name).symlink_to(compared / "runs", target_is_directory=True)


def parts(command: Command) -> set[tuple[str, str]]:
    """What a command may be the first to show: itself, an option, a backend, a file, a setting."""
    name, *words = tiny(command.of_harness() or [])
    options = {(name, word) for word in words if word.startswith("--")}
    files = {("file", given) for given in words if "/" in given or given.startswith("@")}
    kinds = ("--backend", "--set", *(["--to"] if name == "export" else []))
    values = {(given, text) for given, text in pairwise(words) if given in kinds}
    kind = words[0] if words and name in ("explain", "export", "labs", "settings", "show") else ""
    return {(name, kind), ("started by", command.words[0])} | options | files | values


def first_of_their_kind() -> Iterator[Command]:
    """All of the quick start, whose steps build on each other."""
    known: set[tuple[str, str]] = set()
    for command in RUN:
        if command.path.name == "quick-start.md" or not parts(command) <= known:
            known |= parts(command)
            yield command


FEW = list(first_of_their_kind())


@pytest.mark.documented
@pytest.mark.long(seconds=110)
@pytest.mark.parametrize(
    ("asked", "path"),
    [
        pytest.param(asked, path, marks=marks, id=f"{name} {path.relative_to(ROOT).as_posix()}")
        for name, asked, marks in (("few", FEW, ()), ("all", RUN, EXHAUSTIVE))
        for path in sorted({found.path for found in asked})
    ],
)
def test_the_commands_of_a_file_run(asked: list[Command], path: Path, compared: Path, tmp_path: Path) -> None:
    checkout(tmp_path, compared)
    done: set[str] = set()
    for command in (found for found in asked if found.path == path):
        words = tiny(command.of_harness() or [])
        if shlex.join(words) not in done:
            done.add(shlex.join(words))
            run(command, words, tmp_path)


def run(command: Command, words: list[str], folder: Path) -> None:
    """Run it in `folder`; a gate may refuse what it measured."""
    if command.words[0] == "torchrun":
        launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "harness"]
        given = subprocess.run(
            [*launched, *words], cwd=folder, env=environment(PYTHONPATH=str(ROOT)),
            capture_output=True, text=True, timeout=4 * patience.SECONDS, check=False,
        )  # fmt: skip
    else:
        expanded = [name for word in words for name in globbed(word, folder)]
        given = harness(*expanded, cwd=folder)
    gated = {"--require-busbw", "--fail-on"} & set(words)
    allowed = (0, REFUSED_BY_GATE) if gated else (0,)
    if "--over" in words and "does not differ between these records" in given.stderr:
        allowed = (1,)  # one environment has one version
    assert given.returncode in allowed, f"{command.place}\n{os.linesep.join(words)}\n{given.stderr[-2000:]}"


def globbed(word: str, folder: Path) -> list[str]:
    """The word, or what a shell makes of it; a cluster's shared folder lies within this one."""
    word = word.replace("/shared/", "cluster/") if word.startswith("/shared/") else word
    found = sorted(folder.glob(word)) if "*" in word and "/" in word else []
    return [path.relative_to(folder).as_posix() for path in found] or [word]


NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@pytest.mark.documented
def test_there_is_a_notebook_and_none_has_outputs() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert [cell for cell in cells if cell.cell_type == "code" and cell.outputs] == []


@pytest.mark.documented
def test_the_notebook_compares_ddp_with_fsdp(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "compare.ipynb", as_version=4)
    seconds = int(4 * patience.SECONDS)
    client = NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(tmp_path)}})
    with patch.dict(os.environ, environment(PYTHONPATH=str(ROOT)), clear=True):
        client.execute()
    shown = {cell.source: text(cell) for cell in notebook.cells if cell.cell_type == "code"}
    (ratios,) = (text for source, text in shown.items() if "fsdp.model_state_bytes / ddp" in source)
    states, sent = (float(part.split("(")[-1].rstrip(")")) for part in ratios.split(","))
    assert states == pytest.approx(0.5, rel=0.01)
    assert sent == pytest.approx(1.5, rel=0.01)
    assert "report.md" in os.listdir(tmp_path)
    assert "# " in shown[notebook.cells[-1].source]


def text(cell: nbformat.NotebookNode) -> str:
    """What a cell shows as its result."""
    found = [out.data for out in cell.outputs if out.output_type == "execute_result"]
    return "".join(data.get("text/markdown", data.get("text/plain", "")) for data in found)


def test_each_name_of_the_diagram_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().split("### From `compare` to `record.json`")[1]
    drawn = text.split("```text\n")[1].split("```")[0]
    names = [line.split()[0] for line in drawn.splitlines() if "." in line]
    assert len(names) > 30
    for name in names:
        pkgutil.resolve_name(f"harness.{name}")
