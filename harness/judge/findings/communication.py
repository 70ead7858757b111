"""Runs that communicated something other than the closed form of their implementation."""

from __future__ import annotations

from collections.abc import Sequence

from harness.forms.workload import ELSEWHERE
from harness.judge.effective import EVERY_MICRO_STEP, counted_synchronisation
from harness.judge.findings.finding import Finding
from harness.judge.measures import reduced_bytes
from harness.judge.repeats import Runs
from harness.judge.rows import Row
from harness.judge.volume import VolumeDifference, volume_differences, volume_of


def find(runs: Runs) -> list[Finding]:
    """One finding per run whose payload differs anywhere, by a single byte or more."""
    trained = [row for row in runs.rows if row.record.status in ("ok", "diverged")]
    looked = (look(row) for row in trained for look in (_differs, _early))
    return [finding for finding in looked if finding is not None]


def _differs(row: Row) -> Finding | None:
    differences = volume_differences(row.record)
    if not differences:
        return None
    messages = _messages(differences, row.record.world.accumulation_steps)
    return Finding(
        id="communication-differs",
        about=row.cell,
        text="; ".join(messages),
        values={"differences": [vars(difference) for difference in differences]},
    )


def _early(row: Row) -> Finding | None:
    """Of a backend without a closed form; one that shards gradients may reduce early, if it declares so."""
    record = row.record
    if volume_of(record) is not None or counted_synchronisation(record) != EVERY_MICRO_STEP:
        return None
    effective = record.backend.effective
    declared = effective.gradient_synchronisation if effective else None
    sharded = (record.backend.shard_size or 1) > 1
    if declared == EVERY_MICRO_STEP and sharded:
        return None
    early = max(rank.early_reduced_bytes or 0 for rank in record.ranks)
    return Finding(
        id="synchronised-early",
        about=row.cell,
        text=f"gradients are reduced in every micro-step: {early:,} of "
        f"{reduced_bytes(record):,} reduced bytes cross the wire before the last of "
        f"{record.world.accumulation_steps} micro-steps"
        + (f", although it declares: {declared}" if declared else ""),
        values={"early_reduced_bytes": early, "reduced_bytes": reduced_bytes(record), "declared": declared},
    )


def _messages(differences: Sequence[VolumeDifference], accumulation_steps: int) -> list[str]:
    """One clause per cause: two dtypes of one collective are one."""
    left = list(differences)
    messages = []
    while left:
        first = left.pop(0)
        partner = next((other for other in left if _in_its_place(first, other)), None)
        if partner is not None:
            left.remove(partner)
            messages.append(_exchange_message(first, partner))
        else:
            messages.append(_message(first, accumulation_steps))
    return messages


def _in_its_place(one: VolumeDifference, other: VolumeDifference) -> bool:
    """Whether one is measured and not expected where the other is expected and not measured, in another
    dtype of the same group or in another group with the same dtype."""
    same = (one.phase, one.op) == (other.phase, other.op)
    alike = one.role == other.role or one.dtype == other.dtype
    lacks = one.measured_bytes == 0 and other.expected_bytes == 0
    return same and alike and (lacks or (other.measured_bytes == 0 and one.expected_bytes == 0))


def _exchange_message(one: VolumeDifference, other: VolumeDifference) -> str:
    measured, expected = (one, other) if one.measured_bytes else (other, one)
    runs, wanted = (
        (measured.dtype, expected.dtype)
        if measured.role == expected.role
        else (_group(measured), _group(expected))
    )
    return (
        f"{measured.op} in {measured.phase} runs in {runs}, expected {wanted} "
        f"({measured.measured_bytes:,} bytes against {expected.expected_bytes:,})"
    )


def _group(difference: VolumeDifference) -> str:
    return difference.group if difference.role == ELSEWHERE else f"the {difference.role} group"


def _message(difference: VolumeDifference, accumulation_steps: int) -> str:
    measured, expected = difference.measured_bytes, difference.expected_bytes
    where = f"{difference.op} of {difference.dtype} in {difference.phase}"
    if difference.role != "world":
        where += f" in {_group(difference)}"
    figures = f"{where} moves {measured:,} bytes, expected {expected:,}"
    if difference.role == "replica" and not measured:
        return f"never reduces across replicas: {figures}"
    if expected and measured % expected == 0:
        times = measured // expected
        if times == accumulation_steps > 1 and "reduce" in difference.op:
            return f"synchronised at every micro-step: {figures}, {times} times as much"
        if times > 1:
            return f"{figures}, {times} times as much"
    return figures
