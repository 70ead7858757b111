"""Settings of `accelerate launch` that had no effect, since the job decides."""

from __future__ import annotations

from harness.judge.findings.finding import Finding, of_cells
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.record import Record

ID = "launcher-settings-overridden"

NEUTRAL = ("", "no", "none", "false", "0", "default")
"""Values that switch nothing on, in small letters."""
PRECISION = "ACCELERATE_MIXED_PRECISION"
SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_CONFIG_DS_FIELDS")
"""They say that others of their kind follow, or count."""


def find(runs: Runs) -> list[Finding]:
    """One finding per run whose launcher had settings that the job contradicts or does not know."""
    return of_cells(runs, _judge)


def overridden(record: Record) -> dict[str, str | None]:
    """The launcher's settings without effect, as 'NAME=value', each with what ran instead where known."""
    given = record.environment.launcher_settings
    ran = _in_force(record)
    on_cpu = "ACCELERATE_USE_CPU" if record.world.device == "cpu" else None
    found: dict[str, str | None] = {}
    for name, value in given.items():
        if name in ran:
            if _number(value) != _number(ran[name]):
                found[f"{name}={value}"] = ran[name]
        elif value.lower() not in NEUTRAL and name not in (*SWITCHES, on_cpu):
            found[f"{name}={value}"] = None
    return found


def overridden_text(record: Record) -> str | None:
    """The same in one clause; None: nothing was overridden."""
    found = overridden(record)
    named = ", ".join(f"{given} (in force: {ran})" if ran else given for given, ran in found.items())
    return f"the launcher's {named} had no effect: job and backend decide" if found else None


def _judge(row: Row) -> Finding | None:
    text = overridden_text(row.record)
    if text is None:
        return None
    return Finding(id=ID, about=row.cell, text=text, values={"overridden": list(overridden(row.record))})


def _in_force(record: Record) -> dict[str, str]:
    """What ran, under the launcher's names and in its words."""
    training = record.job.training
    precision, clipping = training.precision, training.gradient_clipping
    return {
        PRECISION: precision.removesuffix("-mixed") if str(precision).endswith("-mixed") else "no",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(record.world.accumulation_steps),
        "ACCELERATE_GRADIENT_CLIPPING": "none" if clipping is None else str(clipping),
    }


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text.lower()
