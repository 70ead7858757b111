"""One public script: where it is, how it is started, and the same job for the harness."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

LIST = Path(__file__).with_name("cases.yaml")
RANKS = 2
JOB = "benchmarks.observed_scripts.job"
COMMON = {
    "schedule.kind": "constant", "schedule.warmup_steps": 0, "training.deterministic": False,
    "measure.traced_steps": 0, "measure.weight_digests": False, "runtime.preset": "library-defaults",
    "runtime.threads_per_rank": 1, "data.shuffle": False, "model.dropout": None,
}  # fmt: skip


class Case(BaseModel):
    """An entry of `cases.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    framework: str
    repository: str
    commit: str
    script: str
    device: Literal["cpu", "cuda"]
    inputs: str | None = None
    """Function of `inputs` that makes what the script would download."""
    command: str
    backend: str
    task: str = "custom"
    accumulation: int = 1
    fields: dict[str, str]
    model: dict[str, Any]
    loss: str | None = None
    settings: dict[str, Any]
    left_over: str | None = None
    """Kind of tensors that the script keeps until its next step."""
    losses: int | None = None
    why: str | None = None

    def fetch(self, clones: Path, work: Path) -> None:
        """The folder of the script as it is in the commit. Raises CalledProcessError where there is none."""
        clone = clones / self.repository.replace("/", "+")
        clone = clone / "repo" if (clone / "repo").is_dir() else clone
        source = work / "source"
        source.mkdir(parents=True)
        folder = str(PurePosixPath(self.script).parent)
        names = subprocess.run(
            ["git", "-C", str(clone), "ls-tree", "-r", "--name-only", self.commit, f"{folder}/"],
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        for name in names:
            if name.endswith((".py", ".yaml")):
                done = subprocess.run(
                    ["git", "-C", str(clone), "show", f"{self.commit}:{name}"],
                    capture_output=True,
                    check=True,
                )
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_bytes(done.stdout)

    def words(self, work: Path) -> list[str]:
        """The command."""
        places = {"script": work / "source" / self.script, "work": work}
        return [word.format(**places) for word in self.command.split()]

    def job(self, work: Path, size: int, steps: int) -> dict[str, Any]:
        """Settings of the job, and of how it is measured. `size`: samples of a micro-batch."""
        kept = str(work / "kept")
        arguments = {
            name: value.format(work=work) if isinstance(value, str) else value
            for name, value in self.model.get("arguments", {}).items()
        }
        document: dict[str, Any] = {
            "task": self.task,
            "model.factory": f"{JOB}:model",
            "model.arguments.build": self.model["build"],
            "model.arguments.source": str((work / "source" / self.script).parent),
            "model.arguments.kept": kept,
            "data.factory": f"{JOB}:samples",
            "data.arguments.kept": kept,
            "data.arguments.ranks": RANKS,
            "data.arguments.accumulation": self.accumulation,
            "training.steps": steps,
            "training.global_batch_size": size * RANKS * self.accumulation,
            "training.micro_batch_size": size,
            **{f"model.arguments.arguments.{name}": value for name, value in arguments.items()},
            **{f"data.arguments.fields.{name}": theirs for name, theirs in self.fields.items()},
            **COMMON,
            **self.settings,
        }
        if "block_class" in self.model:
            document["model.block_class"] = self.model["block_class"]
        if self.loss is not None:
            document |= {"loss.factory": f"{JOB}:loss", "loss.arguments.kind": self.loss}
        return document


def cases() -> list[Case]:
    return [Case.model_validate(entry) for entry in YAML(typ="safe", pure=True).load(LIST.read_text())]
