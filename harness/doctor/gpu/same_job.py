"""Checks that runs start from the same weights, repeat themselves, and compute what the CPU computes."""

from __future__ import annotations

from harness.doctor.gpu.check import Check, Finding, held
from harness.doctor.gpu.evidence import AGAIN, ON_CPU, SHARDED, SINGLE, ZERO, Evidence

LOSS_TOLERANCE = 1e-5
"""Relative; fp32 without TF32, so what differs is the order of additions."""


def digests_are_equal(evidence: Evidence) -> Finding:
    """Every strategy starts from the weights of `single`."""
    runs = (SINGLE, ZERO, SHARDED)
    digests = {name: w.digest for name in runs if (w := evidence.records[name].initial_weights) is not None}
    other = [name for name in runs if digests.get(name) != digests.get(SINGLE) or name not in digests]
    if other:
        return "failed", f"{', '.join(other)}: other initial weights than {SINGLE}, or none digested"
    return "ok", f"{digests[SINGLE][:12]} in {len(runs)} runs"


def repeats_are_equal(evidence: Evidence) -> Finding:
    """Two runs of `single` have the same bits."""
    first, second = evidence.records[SINGLE], evidence.records[AGAIN]
    for before, after in zip(first.steps, second.steps, strict=False):
        if (before.loss, before.gradient_norm) != (after.loss, after.gradient_norm):
            return "failed", f"step {before.step}: losses {before.loss!r} and {after.loss!r}"
    weights = (first.final_weights, second.final_weights)
    if len(first.steps) != len(second.steps) or None in weights:
        return "failed", "a run lacks steps, or the digest of its last weights"
    same = weights[0] is not None and weights[1] is not None and weights[0].digest == weights[1].digest
    return held(
        same, f"{len(first.steps)} losses and norms are equal, last weights {'too' if same else 'differ'}"
    )


def loss_is_that_of_the_cpu(evidence: Evidence) -> Finding:
    """The first step's loss, relative to the CPU's."""
    ours, cpu = (evidence.records[name].steps[0].loss for name in (SINGLE, ON_CPU))
    if ours is None or cpu is None:
        return "failed", f"losses {ours} and {cpu}"
    difference = abs(ours - cpu) / abs(cpu)
    return held(difference <= LOSS_TOLERANCE, f"differs by {difference:.1e}")


CHECKS = (
    Check(
        id="initial-weights", question="Do strategies start from the weights of `single`?",
        tolerance="equal digests", judge=digests_are_equal, runs=(SINGLE, ZERO, SHARDED),
    ),
    Check(
        id="repeat", question="Does `single` repeat itself?", tolerance="bit-equal",
        judge=repeats_are_equal, runs=(SINGLE, AGAIN),
    ),
    Check(
        id="cpu-loss", question="Is the first loss that of the CPU?", tolerance=f"{LOSS_TOLERANCE:g}",
        judge=loss_is_that_of_the_cpu, runs=(SINGLE, ON_CPU),
        not_on_stub="its kernels are the CPU's",
    ),
)  # fmt: skip
