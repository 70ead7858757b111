"""Runs comparisons into which faults are planted, in namespaces of their own, and looks at what is left."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import HarnessError
from harness.record import Record
from harness.record.store import read_record
from tests.faults.injection import (
    BACKENDS,
    EVALUATED_EVERY,
    PLAN_VARIABLE,
    STEPS,
    Injection,
    kind_of,
    marker,
    write_plan,
)
from tests.faults.namespaces import left_by_processes, leftovers
from tests.faults.plants import FILLER

ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = Path(__file__).parent / "bootstrap"
CLEAN = "zero1"
"""A backend into which nothing is planted, next to the reference."""
MODEL = (
    "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2}"
)
STUCK_SECONDS = 10.0
PHASE_SECONDS = 60.0
SETTINGS = (
    f"model.config={MODEL}", "data.sequence_length=32", f"training.steps={STEPS}", "measure.warmup_steps=1",
    "measure.probed_steps=1", "measure.traced_steps=0", "measure.checkpoint=native",
    f"evaluation.every_steps={EVALUATED_EVERY}", "compare.noise_runs=false", "runtime.threads_per_rank=1",
    f"runtime.stuck_after_seconds={STUCK_SECONDS:g}", f"runtime.phase_timeout_seconds={PHASE_SECONDS:g}",
    "runtime.device=cpu",
)  # fmt: skip
DISK = "64m"
COMMAND_SECONDS = 600.0
"""A command that lasts longer hangs: the longest comparison here takes a third of it."""
WITHOUT_OVERRIDE = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Before a command of root's: permissions of files count for it too."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One call of the command."""

    code: int | None
    """None: it hung and was killed."""
    errors: str
    left: list[str]
    """Processes, shared memory and ports after it had ended."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What became of one injection."""

    injection: Injection
    happened: dict[str, object] | None
    """Run, phase, step and time at which the rank let it happen; None: it never came there."""
    record: Record | None
    record_seconds: float | None
    """From the fault to the record of its run; None where the next call wrote it."""
    calls: Sequence[Ended]
    others_complete: bool | None
    """None: there are no others."""
    left: Sequence[str]


@dataclass
class Scene:
    """A folder with one comparison, called again until nothing is missing."""

    folder: Path
    injections: Sequence[Injection]
    calls: list[Ended] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def play(self) -> list[Seen]:
        """Run the comparison with its faults, and again where it was cut short."""
        self._prepare()
        scope = kind_of(self.injections[0]).scope
        repeats = 1 + max(injection.repeat for injection in self.injections)
        self._compare(repeats)
        while scope != "ranks" and self._is_cut_short() and len(self.calls) < 3 + 2 * len(self.injections):
            self._mend()
            self._compare(repeats)
        left = leftovers(self.runs, self._temporary)
        others = self._others_are_complete(repeats)
        return [seen(one, self._plan, self.runs, self.calls, others, left) for one in self.injections]

    @property
    def _plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def _temporary(self) -> Path:
        return self.folder / "tmp"

    def _prepare(self) -> None:
        for path in (self.runs, self._temporary):
            path.mkdir(parents=True)
        if kind_of(self.injections[0]).scope == "files":
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.runs)], check=True
            )
        write_plan(self._plan, self.injections)

    def _compare(self, repeats: int) -> None:
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        command = [
            *WITHOUT_OVERRIDE, sys.executable, "-m", "harness", "compare",
            "--backends", ",".join([*BACKENDS, CLEAN]), "--nproc", "2", "--repeats", str(repeats),
            "--runs", "runs", *settings,
        ]  # fmt: skip
        self.calls.append(self.call(command))

    def call(self, command: Sequence[str]) -> Ended:
        """Run a command in the folder; one that hangs is killed."""
        process = subprocess.Popen(
            command, cwd=self.folder, env=variables(self._plan, self._temporary), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=COMMAND_SECONDS)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            code = None
        return Ended(code=code, errors=errors, left=left_by_processes())

    def _is_cut_short(self) -> bool:
        return self.calls[-1].code != 0

    def _mend(self) -> None:
        """What a person would do before the next call: free the disk."""
        (self.runs / FILLER).unlink(missing_ok=True)

    def _others_are_complete(self, repeats: int) -> bool:
        """Whether every cell without a fault is ok, and where calls were cut short those with one as well."""
        ok = {
            (r.backend.label, r.repeat)
            for p in self.runs.glob("*/record.json")
            if (r := read_if_sound(p))
            if r.status == "ok"
        }
        wanted = {(label, repeat) for label in ("single", CLEAN, *BACKENDS) for repeat in range(repeats)}
        if kind_of(self.injections[0]).scope == "ranks":
            wanted -= {(injection.backend, injection.repeat) for injection in self.injections}
        return wanted <= ok


def seen(
    injection: Injection, plan: Path, runs: Path, calls: Sequence[Ended], others: bool | None,
    left: Sequence[str],
) -> Seen:  # fmt: skip
    """What the rank noted of its fault, and the record of its run; others: whether they are complete."""
    note = marker(plan, injection)
    happened = json.loads(note.read_text()) if note.exists() else None
    # In a folder of the same name but for its end, where the run's own cannot be written.
    path = next(runs.glob(f"{str(happened['run_id'])[:-6]}*/record.json"), None) if happened else None
    record = read_if_sound(path) if path is not None else None
    seconds = path.stat().st_mtime - happened["at"] if path is not None and record is not None else None
    return Seen(
        injection=injection, happened=happened, record=record, record_seconds=seconds, calls=calls,
        others_complete=others, left=left,
    )  # fmt: skip


def variables(plan: Path, temporary: Path) -> dict[str, str]:
    """The environment of a command in which faults are planted."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), str(ROOT)]),
        "TMPDIR": str(temporary),
        PLAN_VARIABLE: str(plan),
    }


def read_if_sound(path: Path) -> Record | None:
    try:
        return read_record(path)
    except HarnessError:
        return None
