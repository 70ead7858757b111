"""The commands of the documentation run, at the smallest scale, file by file and in order."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import Command, commands, tiny
from tests.docs.markdown import ROOT
from tests.harness.cli.command_line import SHORT, environment, harness

pytestmark = pytest.mark.long(seconds=180)
RUN = [found for found in commands() if found.not_run() is None]
PATHS = sorted({found.path for found in RUN})
REFUSED_BY_GATE = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout's files that commands name, a corpus, a job, and the records of one tiny comparison."""
    made = tmp_path_factory.mktemp("documented")
    for name in ("configs", "slurm", "reports"):
        (made / name).symlink_to(ROOT / name)
    (made / "corpus.txt").write_text("A line of a corpus, as long as it must be.\n" * 200, encoding="utf-8")
    job = (ROOT / "docs" / "tutorials" / "compare.md").read_text(encoding="utf-8")
    (made / "my-job.yaml").write_text(job.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    done = harness("compare", "--backends", "ddp", *SHORT, "--report", "report.md", cwd=made)
    assert done.returncode == 0, done.stderr
    for name in ("old", "new", "runs/before", "runs/after"):
        (made / name).symlink_to(made / "reports/default", target_is_directory=True)
    return made


@pytest.mark.parametrize("path", PATHS, ids=[path.relative_to(ROOT).as_posix() for path in PATHS])
def test_the_commands_of_a_file_run(path: Path, folder: Path) -> None:
    done: set[str] = set()
    for command in (found for found in RUN if found.path == path):
        words = tiny(command.of_harness() or [])
        if shlex.join(words) not in done:
            done.add(shlex.join(words))
            run(command, words, folder)


def run(command: Command, words: list[str], folder: Path) -> None:
    """Run it in `folder`; a gate may refuse what it measured."""
    if command.words[0] == "torchrun":
        launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "harness"]
        given = subprocess.run(
            [*launched, *words], cwd=folder, env=environment(PYTHONPATH=str(ROOT)),
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    else:
        expanded = [name for word in words for name in globbed(word, folder)]
        given = harness(*expanded, cwd=folder)
    gated = {"--require-busbw", "--fail-on"} & set(words)
    allowed = (0, REFUSED_BY_GATE) if gated else (0,)
    assert given.returncode in allowed, f"{command.place}\n{os.linesep.join(words)}\n{given.stderr[-2000:]}"


def globbed(word: str, folder: Path) -> list[str]:
    """The word, or what a shell makes of it."""
    found = sorted(folder.glob(word)) if "*" in word and "/" in word else []
    return [path.relative_to(folder).as_posix() for path in found] or [word]
