"""A folder in which commands run one after the other and share nothing but its files."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.record import Record
from tests.harness.cli.command_line import HARNESS, environment, harness, records
from tests.patience import SECONDS

FORMATS = {"md": "# ", "html": "<!doctype html>", "csv": "backend,", "json": "{"}
"""Extension of a report -> how its text begins."""


@dataclass
class Journey:
    """Runs commands as people type them; every one must end with the exit code that the journey expects."""

    folder: Path
    typed: list[str] = field(default_factory=list)
    """Commands so far, as one would type them."""

    def harness(
        self, *words: str | Path, code: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """`harness WORDS` in the folder; with further environment variables in a process of its own."""
        typed = ["harness", *map(str, words)]
        if variables:
            return self._run(typed, [*HARNESS, *typed[1:]], code, variables)
        self.typed.append(shlex.join(typed))
        return self._ended(harness(*words, cwd=self.folder), code)

    def printed(self, line: str, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command that another one printed, with further words."""
        first, *words = shlex.split(line)
        assert first == "harness", line
        return self.harness(*words, *more, code=code)

    def program(
        self, *words: str | Path, code: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Another program, `python` being the one that runs the tests."""
        first, *rest = map(str, words)
        started = [sys.executable] if first == "python" else [first]
        return self._run([first, *rest], [*started, *rest], code, variables)

    def reports(self, *runs: str | Path, name: str = "report") -> Iterator[Path]:
        """A report of the runs in every format; each begins as its format does."""
        for extension, beginning in FORMATS.items():
            self.harness("report", *runs, "-o", f"{name}.{extension}")
            path = self.folder / f"{name}.{extension}"
            assert path.read_text(encoding="utf-8").startswith(beginning)
            yield path

    def records(self, runs: str = "runs") -> list[Record]:
        """The records of a folder of runs; every run has a whole one."""
        return records(self.folder / runs)

    def record(self, runs: str = "runs") -> Record:
        """The only record of a folder of runs."""
        (found,) = self.records(runs)
        return found

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def _run(
        self, shown: list[str], words: list[str], code: int, variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        self.typed.append(shlex.join(shown))
        done = subprocess.run(
            words, cwd=self.folder, env=environment(**variables), capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        return self._ended(done, code)

    def _ended(self, done: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
        """What a command left, if it ended as the journey expects."""
        story = "\n".join(self.typed)
        assert done.returncode == code, f"{story}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert code not in (0, 1, 2, 3) or "Traceback" not in done.stderr, f"{story}\n{done.stderr[-3000:]}"
        return done
