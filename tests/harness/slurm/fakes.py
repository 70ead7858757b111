"""Stand-ins for Slurm's commands, put on PATH: they log what they are given and answer from a file."""

from pathlib import Path

COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol")


class FakeSlurm:
    """Answers of `sbatch` count up from 1; the others print what `answer` gave them, or fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "count").write_text("0")
        for name in COMMANDS:
            self._write(name, "exit 1")
        self._write("sbatch", f'n=$(($(cat {folder}/count) + 1)); echo $n >{folder}/count; echo "$n;cluster"')
        self.answer("squeue", "")
        self.answer("scancel", "")

    def answer(self, name: str, text: str) -> None:
        (self.folder / f"{name}.answer").write_text(text)
        self._write(name, f"cat {self.folder}/{name}.answer")

    def refuse(self, name: str, message: str) -> None:
        self._write(name, f"echo {message} >&2; exit 1")

    def refuse_jobs(self, known: dict[str, str]) -> None:
        """Let squeue answer for one of these jobs, and refuse every other job and every list."""
        cases = " ".join(f"*--jobs={job}) echo '{line}' ;;" for job, line in known.items())
        refusal = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
        self._write("squeue", f'case "$*" in {cases} *) {refusal} ;; esac')

    def refuse_once(self, name: str, message: str, text: str) -> None:
        """Refuse the first call, answer the others."""
        (self.folder / f"{name}.answer").write_text(text)
        first = f"mkdir {self.folder}/{name}.refused 2>/dev/null"
        self._write(name, f"if {first}; then echo {message} >&2; exit 1; fi; cat {self.folder}/{name}.answer")

    def calls(self, name: str) -> list[str]:
        log = self.folder / f"{name}.log"
        return log.read_text().splitlines() if log.exists() else []

    def _write(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/bash\necho "$*" >>{self.folder}/{name}.log\n{body}\n')
        path.chmod(0o755)
