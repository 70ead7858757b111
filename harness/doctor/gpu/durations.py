"""Checks of durations: phases against the step, the step against events of the stream, no hidden waiting."""

from __future__ import annotations

from statistics import median

from harness.doctor.gpu.check import Check, Finding, held
from harness.doctor.gpu.evidence import SHARDED, ZERO, Evidence
from harness.judge.measures import first_timed
from harness.record import RankPart

PHASE_TOLERANCE = STEP_TOLERANCE = 0.02
ITS_CLOCK = "its events read the host's clock"


def phases_add_up(evidence: Evidence) -> Finding:
    """Forward, backward and update, with the fetching of data, against the step."""
    worst = 0.0
    for name in (ZERO, SHARDED):
        record = evidence.records[name]
        first = first_timed(record)
        for rank in record.ranks:
            steps = rank.step_seconds[first:]
            if not steps or len(rank.phase_seconds) == 0:
                return "failed", f"{name}, rank {rank.rank}: no timed step"
            worst = max(worst, median(_gap(rank, first + index) for index in range(len(steps))))
    return held(worst <= PHASE_TOLERANCE, f"off by {worst:.2%} of the median step")


def _gap(rank: RankPart, step: int) -> float:
    """How far phases are from the step, relative to it; between them the host may fetch data."""
    seconds, data = rank.step_seconds[step], rank.data_seconds[step]
    phases = sum(of_phase[step] for of_phase in rank.phase_seconds.values())
    return max(0.0, phases - seconds, seconds - data - phases) / seconds


def clock_agrees_with_events(evidence: Evidence) -> Finding:
    """The loop's clock against events that were recorded outside of it."""
    worst = 0.0
    for name in (ZERO, SHARDED):
        record, notes = evidence.records[name], evidence.notes.get(name, ())
        first = first_timed(record)
        if len(notes) < len(record.ranks) or first >= len(record.steps):
            return "failed", f"{name}: {len(notes)} of {len(record.ranks)} ranks noted events of timed steps"
        for rank, note in zip(record.ranks, notes, strict=False):
            if len(note.event_step_seconds) != len(rank.step_seconds):
                return "failed", (
                    f"{name}, rank {rank.rank}: {len(note.event_step_seconds)} pairs of events in "
                    f"{len(rank.step_seconds)} steps"
                )
            pairs = zip(rank.step_seconds[first:], note.event_step_seconds[first:], strict=True)
            worst = max(worst, median(abs(clock - events) / events for clock, events in pairs))
    return held(worst <= STEP_TOLERANCE, f"off by {worst:.2%} of the median step")


def no_device_wait(evidence: Evidence) -> Finding:
    """DeepSpeed's micro-steps only queue work."""
    record, notes = evidence.records[ZERO], evidence.notes.get(ZERO, ())
    if (
        not notes
        or not record.steps
        or any(len(note.synchronisations) != len(record.steps) for note in notes)
    ):
        return "failed", "not every rank noted every step"
    most = max(count for note in notes for count in note.synchronisations)
    return held(most == 0, f"{most} in the {notes[0].micro_steps} micro-steps of a step")


CHECKS = (
    Check(
        id="phases", question="Do phases add up to the step?", tolerance=f"{PHASE_TOLERANCE:.0%}",
        judge=phases_add_up, runs=(ZERO, SHARDED), not_on_stub=ITS_CLOCK,
    ),
    Check(
        id="step-time", question="Is the step's time that of CUDA events?", tolerance=f"{STEP_TOLERANCE:.0%}",
        judge=clock_agrees_with_events, runs=(ZERO, SHARDED), not_on_stub=ITS_CLOCK,
    ),
    Check(
        id="deepspeed-waits", question="Does DeepSpeed run micro-steps without a device synchronisation?",
        tolerance="none", judge=no_device_wait, runs=(ZERO,),
    ),
)  # fmt: skip
