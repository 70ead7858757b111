"""Settings of a file or a launcher that are not in force, and versions of libraries known to be faulty."""

from __future__ import annotations

from harness.backends.libraries.facts import FACTS, LibraryFact
from harness.judge.findings.finding import Finding, of_cells
from harness.judge.rows import JudgedRun, Runs
from harness.nested import differences
from harness.record import GivenPart, Record
from harness.record.workload import known_strategy


def find_given(runs: Runs) -> list[Finding]:
    """One for each cell that ran a file exactly as given."""
    others = [
        row.record for row in runs.rows if not _is_as_given(row) and not _is_reference_of_given(row, runs)
    ]

    def judge(row: JudgedRun) -> Finding | None:
        part = row.record.backend.given
        return _as_given(row, part, others) if part is not None and _is_as_given(row) else None

    return of_cells(runs, judge)


def _is_as_given(row: JudgedRun) -> bool:
    part = row.record.backend.given
    return part is not None and part.mode == "exactly-as-given"


def _is_reference_of_given(row: JudgedRun, runs: Runs) -> bool:
    """Whether a row only serves to judge rows that ran exactly as given."""
    same_job = [other for other in runs.rows if other.record.job_id == row.record.job_id]
    return row.is_reference and all(other is row or _is_as_given(other) for other in same_job)


def _as_given(row: JudgedRun, part: GivenPart, others: list[Record]) -> Finding:
    unfair = _unfair(row.record, others)
    pinned = {s.key: {"given": s.given, "used": s.used} for s in part.pinned if s.used is not None}
    says = [f"{name} {mine} against {theirs}" for name, (mine, theirs) in unfair.items()]
    text = f"settings of {part.file} replace those of the comparison: {'; '.join(says)}" if says else (
        f"settings of {part.file} replace those of the comparison; none differs from those of the other rows"
    )  # fmt: skip
    if pinned:
        text += f". Not as given: {', '.join(pinned)}"
    values = {
        "file": part.file,
        "settings": {name: list(pair) for name, pair in unfair.items()},
        "pinned": pinned,
    }
    return Finding(id="exactly-as-given", about=row.cell, text=text, values=values)


def _unfair(record: Record, others: list[Record]) -> dict[str, tuple[object, object]]:
    """Settings with the row's value and that of the others: the job's, the cut of its batch, the preset."""
    other = next((found for found in others if found.world.world_size > 1), next(iter(others), None))
    if other is None:
        return {}
    mine, theirs = record.job.model_dump(mode="json"), other.job.model_dump(mode="json")
    found = {".".join(keys): (left, right) for keys, left, right in differences(mine, theirs)}
    for name in ("micro_batch_size", "accumulation_steps", "preset"):
        left, right = getattr(record.world, name), getattr(other.world, name)
        if left != right:
            found[name] = (left, right)
    return found


OVERRIDDEN = "launcher-settings-overridden"
NEUTRAL = ("", "no", "none", "false", "0", "default")
"""Values that switch nothing on, in small letters."""
PRECISION = "ACCELERATE_MIXED_PRECISION"
SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_CONFIG_DS_FIELDS")
"""They say that others of their kind follow, or count."""


def find_launcher(runs: Runs) -> list[Finding]:
    """One finding per run whose launcher had settings that the job contradicts or does not know."""
    return of_cells(runs, _overridden)


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


def _overridden(row: JudgedRun) -> Finding | None:
    text = overridden_text(row.record)
    if text is None:
        return None
    return Finding(
        id=OVERRIDDEN, about=row.cell, text=text, values={"overridden": list(overridden(row.record))}
    )


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


def find_versions(runs: Runs) -> list[Finding]:
    """One finding per run and fact."""
    return [_faulty(row, fact) for row in runs.rows for fact in FACTS if _is_affected(row, fact)]


def _is_affected(row: JudgedRun, fact: LibraryFact) -> bool:
    record = row.record
    version, strategy = record.backend.versions.get(fact.library), known_strategy(record)
    if fact.effect != "wrong" or version is None or strategy is None or strategy.zero_stage is None:
        return False
    return fact.includes(version) and fact.concerns(
        strategy.zero_stage, record.job.training.held_precision, record.world.accumulation_steps
    )


def _faulty(row: JudgedRun, fact: LibraryFact) -> Finding:
    version = row.record.backend.versions[fact.library]
    return Finding(
        id="faulty-version",
        about=row.cell,
        text=f"{fact.library} {version} {fact.what} (versions {fact.versions})",
        values={"fact": fact.id, "version": version, "versions": fact.versions, "source": fact.source},
    )
