"""Checks of bytes: collectives and model states by closed form, and the allocator against the driver."""

from __future__ import annotations

from harness.doctor.gpu.check import Check, Finding, held
from harness.doctor.gpu.evidence import RUNS, SHARDED, ZERO, Evidence
from harness.judge.states import rank_states
from harness.judge.volume import volume_differences

STRATEGIES = (ZERO, SHARDED)
NORM_SHARE = 0.01
"""Of the gradients, while their norm is taken."""
BESIDES_BYTES = 3 * 2**30
"""CUDA's context, NCCL's buffers and cuBLAS's workspaces, which torch's allocator does not serve."""


def volumes_are_as_expected(evidence: Evidence) -> Finding:
    """Payload of every kind of collective."""
    for name in STRATEGIES:
        differences = volume_differences(evidence.records[name])
        if differences is None:
            return "failed", f"{name}: nothing is expected, or no step was probed"
        if differences:
            first = differences[0]
            return "failed", (
                f"{name}, rank {first.rank}, {first.phase}: {first.op} of {first.dtype} moved "
                f"{first.measured_bytes:,} bytes, expected {first.expected_bytes:,}"
            )
    return "ok", f"every collective of {' and '.join(STRATEGIES)}"


def states_are_as_expected(evidence: Evidence) -> Finding:
    """Weights, gradients and optimizer states of every rank."""
    sizes = []
    for name in STRATEGIES:
        states = rank_states(evidence.records[name])
        if len(states) < evidence.records[name].world.world_size:
            return "failed", f"{name}: {len(states)} ranks measured their states"
        for of_rank in states:
            if of_rank.expected is None:
                return "failed", f"{name}: nothing is expected"
            expected = of_rank.expected.model_state_bytes
            if of_rank.measured_bytes != expected:
                return "failed", (
                    f"{name}, rank {of_rank.rank}: {of_rank.measured_bytes:,} bytes, expected {expected:,}"
                )
        sizes.append(f"{name} {max(of_rank.measured_bytes for of_rank in states):,}")
    return "ok", f"{', '.join(sizes)} bytes"


def norm_needs_no_copy(evidence: Evidence) -> Finding:
    """What taking the norm allocates."""
    notes = evidence.notes.get(SHARDED, ())
    if not notes:
        return "failed", "no rank noted it"
    share = max(note.norm_peak_bytes / note.gradient_bytes for note in notes)
    return held(share <= NORM_SHARE, f"{share:.3%} of {notes[0].gradient_bytes / 1e6:.0f} MB")


def driver_agrees(evidence: Evidence) -> Finding:
    """NVML's figure of the process against what torch reserved."""
    moments = [
        moment
        for name in RUNS
        if name in evidence.records
        for rank in evidence.records[name].ranks
        for moment in rank.memory
    ]
    besides = [
        moment.device_used_bytes - moment.reserved_bytes
        for moment in moments
        if moment.device_used_bytes is not None
        and moment.device_used_of != "device"
        and moment.reserved_bytes is not None
    ]
    if not besides:
        unknown = [moment.device_used_unknown for moment in moments if moment.device_used_unknown]
        return "n/a", unknown[0] if unknown else "no step was probed on a GPU"
    least, most = min(besides), max(besides)
    detail = f"{least / 1e6:,.0f} to {most / 1e6:,.0f} MB above what torch reserved"
    return held(least >= 0 and most <= BESIDES_BYTES, detail)


CHECKS = (
    Check(
        id="traffic", question="Do collectives move what closed forms say?", tolerance="to the byte",
        judge=volumes_are_as_expected, runs=STRATEGIES,
    ),
    Check(
        id="states", question="Are model states as large as closed forms say?", tolerance="to the byte",
        judge=states_are_as_expected, runs=STRATEGIES,
    ),
    Check(
        id="norm", question="Is the gradient norm taken without a copy?",
        tolerance=f"{NORM_SHARE:.0%} of the gradients", judge=norm_needs_no_copy,
        runs=(SHARDED,), not_on_stub="its kernels run on the host, with other temporaries",
    ),
    Check(
        id="driver-memory", question="Does the driver see what torch reserved?",
        tolerance="reserved + 0 to 3 GiB", judge=driver_agrees, runs=(SHARDED,),
        not_on_stub="it has no NVML",
    ),
)  # fmt: skip
