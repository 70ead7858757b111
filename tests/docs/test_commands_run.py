"""The commands of the documentation run, at the smallest scale, file by file and in order."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.docs.commands import Command, commands, tiny
from tests.docs.markdown import ROOT
from tests.harness.cli.command_line import SHORT, environment, harness

pytestmark = [pytest.mark.documented, pytest.mark.long(seconds=180)]
RUN = [found for found in commands() if found.not_run() is None]
PATHS = sorted({found.path for found in RUN})
REFUSED_BY_GATE = 3


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one tiny comparison whose records and report many commands read."""
    made = tmp_path_factory.mktemp("compared")
    done = harness("compare", "--backends", "ddp", *SHORT, "--report", "report.md", cwd=made)
    assert done.returncode == 0, done.stderr
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


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """Commands that depend on no folder and ran before."""
    return set()


@pytest.mark.parametrize("path", PATHS, ids=[path.relative_to(ROOT).as_posix() for path in PATHS])
def test_the_commands_of_a_file_run(path: Path, compared: Path, seen: set[str], tmp_path: Path) -> None:
    checkout(tmp_path, compared)
    done: set[str] = set()
    for command in (found for found in RUN if found.path == path):
        words = tiny(command.of_harness() or [])
        known = seen if words[0] in ("backends", "estimate", "fabric", "recommend", "simulate") else done
        if shlex.join(words) not in known:
            known.add(shlex.join(words))
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
    assert given.returncode in allowed, f"{command.place}\n{os.linesep.join(words)}\n{given.stderr[-2000:]}"


def globbed(word: str, folder: Path) -> list[str]:
    """The word, or what a shell makes of it; a cluster's shared folder lies within this one."""
    word = word.replace("/shared/", "cluster/") if word.startswith("/shared/") else word
    found = sorted(folder.glob(word)) if "*" in word and "/" in word else []
    return [path.relative_to(folder).as_posix() for path in found] or [word]
