"""Records of timed runs, built without running anything."""

from collections.abc import Sequence
from typing import Any

from harness.judge.comparison import Comparison
from harness.judge.findings.finding import Finding
from harness.record import ProcessorPart, RankPart, Record
from tests.records import make_ranks, make_record, make_steps

WINDOWS = ("warmup", "warmup", "probed", "traced", *["timed"] * 8)
COUNT = len(WINDOWS)
PHASES = {"forward": 0.1, "backward": 0.3, "step": 0.05}


def steps(seconds: Sequence[float] = (0.5,) * COUNT) -> list[Any]:
    changes = {n: {"window": w, "seconds": s} for n, (w, s) in enumerate(zip(WINDOWS, seconds, strict=True))}
    return make_steps([5.0] * COUNT, [1.0] * COUNT, changes=changes)


def processors(**changes: Any) -> ProcessorPart:
    """A rank of two that computed all the time on two cores of its own."""
    values = {
        "seconds": 4.0, "process_seconds": 4.0, "waiting_seconds": 0.0,
        "machine_busy_seconds": 8.0, "machine_stolen_seconds": 0.0, "boot": "this machine",
    }  # fmt: skip
    return ProcessorPart(**(values | changes))


def ranks(count: int = 2, of_all: dict[str, Any] | None = None, **changes: Any) -> list[RankPart]:
    """Ranks of the steps above, alike but for `changes` to rank 1; `of_all`: fields of every rank."""
    values = {
        "step_seconds": [0.5] * COUNT,
        "data_seconds": [0.01] * COUNT,
        "phase_seconds": {name: [seconds] * COUNT for name, seconds in PHASES.items()},
        "processors": processors(machine_busy_seconds=4.0 * count),
    }
    parts = [part.model_copy(update=values | (of_all or {})) for part in make_ranks(count)]
    return [*parts[:1], parts[1].model_copy(update=changes), *parts[2:]] if count > 1 else parts


def run(label: str = "ddp", **changes: Any) -> Record:
    return make_record(label=label, **({"steps": steps(), "ranks": ranks()} | changes))


def phases(forward: float) -> dict[str, list[float]]:
    """Of a rank whose forward passes last so long and whose backward passes take the rest of the step."""
    return {"forward": [forward] * COUNT, "backward": [0.4 - forward] * COUNT, "step": [0.05] * COUNT}


def repeats(count: int, **changes: Any) -> list[Record]:
    """The same run so many times."""
    return [run(repeat=repeat, run_id=f"r{repeat}", **changes) for repeat in range(count)]


def found(*records: Record) -> list[Finding]:
    reference = make_record(steps=steps(), ranks=ranks(1))
    return Comparison([reference, *records]).findings
