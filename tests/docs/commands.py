"""The commands of the documentation: which words they have, and the same at a scale that a test can run."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.markdown import FILES, ROOT, shell_lines
from tests.harness.cli.command_line import SHORT

NOT_RUN = {
    "make ": "the makefile's targets run whole suites; the test of the syntax holds that they exist",
    "source ": "activates an environment",
    "pip ": "installs packages",
    "python3 -m venv": "installs packages",
    "/shared/harness/bin/pip": "installs packages",
    "python benchmarks/memory_table.py": "reads the records of two matrices of up to 4 ranks",
    "harness compare --set optimizer.kind=adamw-8bit": "needs torchao: tests/axes",
    "harness compare --set training.precision=fp8": "needs torchao: tests/axes",
    "harness compare --set model.compile": "compiling takes minutes: tests/axes",
    "harness run --backend zero3 --nproc 2 --set 'adapter": "tests/adapters runs such jobs",
    "srun ": "needs Slurm: tests/cluster",
    "torchrun --nnodes": "needs several machines: tests/cluster",
    "accelerate launch": "tests/cluster starts ranks with it",
    "harness slurm submit": "needs Slurm: tests/cluster",
    "harness slurm status": "needs Slurm: tests/cluster",
    "harness slurm collect": "needs Slurm: tests/cluster",
    "harness slurm cancel": "needs Slurm: tests/cluster",
    "harness fabric --max-size 4GB": "takes minutes over gloo",
    "harness slurm render --site @ibex --config @labs": "needs a data set that is not in the repository",
    "harness labs run": "make labs runs every lab",
    "harness labs table": "reads the runs of a lab: tests/harness/labs",
    "harness doctor": "takes two minutes: tests/harness/cli/test_doctor.py",
    "harness compare --script": "runs scripts of the user: tests/journeys/test_scripts.py",
    "harness compare --backends ddp,zero2 --nproc 2 -- train.py": "the same",
    "harness compare --backends ddp,zero2,zero3,fsdp --nproc 2 --report report.md -- train.py": "the same",
    "harness observe": "runs a script of the user: tests/harness/rank/observing",
    "harness trace": "reads traces of the user: tests/harness/traces",
    "harness snapshot": "reads a snapshot of the user: tests/harness/snapshots",
    "harness hang": "reads dumps of the user: tests/harness/snapshots",
    "harness diagnose runs/RUN_A runs/RUN_B": "stands for the names of two runs; the tutorial's line runs",
    "harness diagnose runs/stages/": "the tutorial's line runs",
    "harness fit --backend zero3 --set training.global_batch_size=64": "needs a GPU, whose memory limits it",
    "harness compare --batch largest --set": "needs a GPU, whose memory limits it",
    "harness compare --batch largest --backends": "needs a GPU, whose memory limits it",
    "harness compare --set model.name=": "needs a model that is not in the repository",
    "harness recommend --model /models/mine": "needs a model that is not in the repository",
    "harness compare --backends ddp,all-reduce": "needs the package: tests/backends/test_own_backend.py",
    "harness compare --backends fsdp,fsdp-hybrid:shard_size=2 --nproc 4": "four ranks: tests/traps",
    "harness compare --backends autotp-zero1,autotp-zero3 --nproc 4": "four ranks: tests/traps",
    "harness estimate --model llama-3.1-8b --gpu H100-80 --calibrate": "needs runs on a GPU",
    "harness compare --config configs/memory-": "ten backends on up to 4 ranks",
    "harness compare --config @vit": "tests/examples",
    "harness compare --config @resnet": "tests/examples",
    "harness compare --config @t5": "tests/examples",
    "harness compare --config @own-model": "tests/examples",
}
"""Beginnings of the commands that no test here runs, with the reason."""

LEAST = {"--repeats": "1", "--limit": "8MB"}
"""Options with the value that a test gives them."""


@dataclass(frozen=True)
class Command:
    """A line of a block of shell code."""

    path: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def of_harness(self) -> list[str] | None:
        """What follows `harness`, however it is started; None: another command."""
        words = self.words
        return words[words.index("harness") + 1 :] if "harness" in words else None

    def not_run(self) -> str | None:
        """Why no test runs it; None: one does."""
        found = [reason for beginning, reason in NOT_RUN.items() if self.text.startswith(beginning)]
        return found[0] if found else None


def commands() -> Iterator[Command]:
    """Every command of the documentation; reports' own commands are tested where reports are."""
    for path in FILES:
        if not (path.is_relative_to(ROOT / "reports") and path.name.startswith("report.")):
            for line, text in shell_lines(path):
                if not text.startswith("#"):
                    yield Command(path, line, text)


def tiny(words: list[str]) -> list[str]:
    """The same command on two ranks at most, once, with a job that is over in seconds."""
    command, *rest = words
    if command not in ("compare", "estimate", "fit", "run", "simulate"):
        return [*words, "--max-size", "64KB"] if command == "fabric" else words
    found = [command, *_scaled(command, rest), *([] if command == "estimate" else SHORT)]
    if "measure.trace=true" in rest:
        found += ["--set", "measure.traced_steps=1"]
    if command == "compare":
        found += ["--set", "compare.noise_runs=false"]
        if "--backends" not in rest:
            found += ["--backends", "ddp"]
    return found + (["--most-runs", "1"] if command == "fit" else [])


def _scaled(command: str, words: list[str]) -> Iterator[str]:
    """The options with small values; those that ask for a size are left out."""
    waiting = iter(words)
    for word in waiting:
        if word in ("--nproc", "--world-size"):
            yield from (word, str(min(2, max(map(int, next(waiting).split(","))))))
        elif word in LEAST:
            next(waiting)
            yield from (word, LEAST[word])
        elif word == "--backends" and command in ("compare", "simulate"):
            yield from (word, next(waiting).split(",")[0])
        elif word in ("--model", "--gpus-per-node", "--rank") and command == "simulate":
            next(waiting)
        elif word == "--set":
            setting = next(waiting)
            yield from () if setting.startswith("training.steps=") else (word, setting)
        else:
            yield word
