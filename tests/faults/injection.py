"""Which fault goes where: plain data that a driver plans and ranks read. Imports nothing heavy."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

BACKENDS = ("ddp", "zero3", "fsdp")
STEPS = 6
EVALUATED_EVERY = 3
PLAN_VARIABLE = "PLANTED_FAULTS"
"""Environment variable with the file of the injections."""

Scope = Literal["ranks", "launcher", "files", "network"]
"""What breaks: a rank of a comparison, the comparison itself, its disk, or the link between two nodes."""
IN_STEP = ("data", "forward", "backward", "step")
BEFORE = ("load data", "setup")
"""Phases that come once, with a process group."""
BETWEEN = ("evaluation", "checkpoint")
ANYWHERE = ("rendezvous", *BEFORE, *IN_STEP, *BETWEEN, "measurements")
WITH_GROUP = (*BEFORE, *IN_STEP, *BETWEEN)
"""Where collectives can be called, and others follow."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A fault and where it can happen."""

    name: str
    what: str
    """For a reader of the table."""
    scope: Scope = "ranks"
    phases: tuple[str, ...] = ANYWHERE


KINDS = (
    Kind(name="raise", what="a rank raises"),
    Kind(name="host-memory", what="a rank asks for more host memory than its limit (RLIMIT_AS)"),
    Kind(name="device-memory", what="a rank raises what CUDA's allocator raises"),
    Kind(name="nan-loss", what="a rank's loss becomes NaN", phases=("forward",)),
    Kind(name="infinite-loss", what="a rank's loss becomes infinite", phases=("forward",)),
    Kind(name="no-library", what="transformers cannot be imported", phases=("rendezvous", "load data")),
    Kind(name="exit-0", what="a rank leaves with exit code 0"),
    Kind(name="exit-5", what="a rank leaves with exit code 5"),
    Kind(name="terminated", what="a rank is ended by SIGTERM"),
    Kind(name="killed", what="a rank is ended by SIGKILL"),
    Kind(name="sleep", what="a rank sleeps"),
    Kind(name="stopped", what="a rank is stopped (SIGSTOP)"),
    Kind(name="extra-collective", what="a rank calls a collective too many", phases=WITH_GROUP),
    Kind(name="other-collective", what="a rank calls another collective than the others", phases=WITH_GROUP),
    Kind(name="full-disk", what="the disk of the runs is full", scope="files"),
    Kind(name="read-only", what="the run's folder becomes read-only"),
    Kind(name="network", what="the link between two nodes goes down", scope="network", phases=WITH_GROUP),
    Kind(name="ctrl-c", what="the comparison receives SIGINT (Ctrl-C)", scope="launcher"),
    Kind(name="launcher-terminated", what="the comparison receives SIGTERM", scope="launcher"),
    Kind(name="launcher-killed", what="the comparison receives SIGKILL", scope="launcher"),
)


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One fault in one run."""

    name: str
    kind: str
    backend: str
    repeat: int
    rank: int
    phase: str
    step: int | None
    """None: the phase comes once."""


def plan(kinds: Iterable[Kind], repeats: int, seed: int) -> list[Injection]:
    """Each kind in each backend, `repeats` times, at ranks, phases and steps that the seed draws."""
    return [
        _drawn(kind, backend, repeat, seed)
        for kind in kinds
        for repeat in range(repeats)
        for backend in BACKENDS
    ]


def together(kinds: Iterable[Kind], seed: int) -> list[Injection]:
    """One kind in each backend, as one comparison."""
    return [_drawn(kind, backend, 0, seed) for kind, backend in zip(kinds, BACKENDS, strict=True)]


def _drawn(kind: Kind, backend: str, repeat: int, seed: int) -> Injection:
    name = f"{kind.name}-{backend}-{repeat}"
    draw = random.Random(f"{seed} {name}")
    phase = draw.choice(kind.phases)
    return Injection(
        name=name,
        kind=kind.name,
        backend=backend,
        repeat=repeat,
        rank=draw.randrange(2),
        phase=phase,
        step=draw.randrange(STEPS) if phase in IN_STEP else None,
    )


def write_plan(path: Path, injections: Sequence[Injection]) -> None:
    path.write_text(json.dumps([asdict(injection) for injection in injections]))


def read_plan(path: Path) -> list[Injection]:
    return [Injection(**document) for document in json.loads(path.read_text())]


def kind_of(injection: Injection) -> Kind:
    return next(kind for kind in KINDS if kind.name == injection.kind)


def marker(plan_file: Path, injection: Injection) -> Path:
    """Where the rank notes that the fault happened, and where it was; a fault happens once."""
    return plan_file.with_name(f"{injection.name}.planted")
