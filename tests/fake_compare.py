"""`harness compare` over ranks without torch, as a program: `python -m tests.fake_compare KIND ARGUMENTS`.

KIND says how the ranks of ddp behave: 'sound', or one of those below.
"""

import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.cli import harness
from harness.launch.launcher import InTurns
from harness.run_directory.assemble import Outcome
from harness.run_directory.request import RunRequest, rank_file
from tests.fake_ranks import FakeLauncher, Rank
from tests.patience import until


def sound(rank: Rank) -> None:
    rank.train(4)
    rank.done()


def slow(rank: Rank) -> None:
    rank.train(2)
    time.sleep(2)
    rank.train(4, first=2)
    rank.done()


def endless(rank: Rank) -> None:
    rank.train(4)
    time.sleep(60)


def removed(rank: Rank) -> None:
    rank.train(4)
    shutil.rmtree(rank.log.parent, ignore_errors=True)
    time.sleep(60)


def all_removed(rank: Rank) -> None:
    rank.train(4)
    shutil.rmtree(rank.log.parents[1], ignore_errors=True)
    time.sleep(60)


def closed(rank: Rank) -> None:
    rank.train(4)
    rank.log.parent.chmod(0o555)
    rank.done()


def all_train(rank: Rank) -> None:
    """Four steps, and wait for the other rank's."""
    rank.train(4)
    files = [rank_file(rank.folder, number) for number in range(2)]
    until(lambda: sum(file.read_bytes().count(b"\n") for file in files if file.exists()) >= 8)


def replaced(rank: Rank) -> None:
    all_train(rank)
    with suppress(OSError):
        rank.log.parent.rename(rank.log.parents[2] / rank.log.parent.name)
        rank.log.parent.write_text("")
    time.sleep(60)


def moved(rank: Rank) -> None:
    all_train(rank)
    with suppress(OSError):
        rank.log.parent.rename(rank.log.parent.with_name(f"moved-{rank.log.parent.name}"))
    time.sleep(60)


def piped(rank: Rank) -> None:
    folder = rank.log.parent.with_name(f"moved-{rank.log.parent.name}")
    all_train(rank)
    with suppress(OSError):
        os.mkfifo(rank.log.with_name("pipe"))
        rank.log.parent.rename(folder)
        (folder / "pipe").rename(rank_file(folder, 0))
    time.sleep(60)


KINDS = {
    "sound": sound, "slow": slow, "endless": endless, "removed": removed, "all_removed": all_removed,
    "closed": closed, "replaced": replaced, "moved": moved, "piped": piped,
}  # fmt: skip


class Launcher(FakeLauncher):
    """Sound ranks for the reference; for ddp the kind that the test asks for."""

    def __init__(self, kind: str) -> None:
        super().__init__(defaultdict(lambda: sound))
        self.kind = kind

    def check(self, job_json: str) -> dict[str, Any]:
        return {"model": {}, "data": {"training_samples": 1_000_000}}

    def running(
        self, run_directory: Path, request: RunRequest, *settings: Any, **more: Any
    ) -> InTurns[Outcome]:
        if request.backend.startswith("ddp"):
            if self.kind == "unstartable":
                raise RuntimeError("no process can be started: \udc80\x1b[2J")
            if self.kind == "interrupted":
                self.behaviours = defaultdict(lambda: endless)
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            else:
                self.behaviours = defaultdict(lambda: KINDS[self.kind])
        else:
            self.behaviours = defaultdict(lambda: sound)
        return super().running(run_directory, request, *settings, **more)


def main(kind: str, arguments: list[str]) -> None:
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C
    with patch("harness.cli.compare.LocalLauncher", lambda *_: Launcher(kind)):
        harness(["compare", "--backends", "ddp", "--nproc", "2", *arguments], prog_name="harness")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(sys.argv[1], sys.argv[2:])
