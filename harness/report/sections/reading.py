"""How each number was read."""

from __future__ import annotations

from harness.compare.comparison import Comparison
from harness.compare.statistics import LEAST_FOR_P95, LEVEL, MOST_DIVISIONS, interval_runs, runs_to_judge
from harness.report.document import Items, Section
from harness.report.formats import percent


def reading_section(comparison: Comparison) -> Section:
    """Definitions and formulae of the columns."""
    return Section("reading", "How to read the numbers", [Items(_LINES)])


_LINES = [
    "MB is 1e6 bytes; n/a means not measured.",
    "samples/s and tokens/s: what all ranks consumed in the timed steps, over the summed duration "
    "of those steps; the median over repeats. A step lasts as long as on its slowest rank. "
    "Padding is no token.",
    "step ms: the median over the timed steps of all repeats together; p95 their 95th percentile, "
    f"not told of fewer than {LEAST_FOR_P95} steps, where it would be the largest. Under "
    "'Time' each run has its own median, of which that over repeats is shown.",
    f"least and most: of the runs, as measured. Of {interval_runs()} runs or more there is also an "
    f"interval that holds the true median at {percent(LEVEL)}, between order statistics (sign test).",
    "beyond noise: a permutation test of the mean throughput of whole runs, never of steps, two-sided, says "
    f"that chance alone makes two cells differ so in at most {percent(1 - LEVEL)} of cases, divided by the "
    "number of pairs among the cells, since the fastest is chosen after the fact. It is exact: every "
    f"division of the runs counts, beyond {MOST_DIVISIONS:,} of them (9 runs of each) a fixed sample. Two "
    f"cells need {runs_to_judge()} runs each for it; below what is needed nothing is judged. Runs of a "
    "cell also differ from those of another by what changed on the machine meanwhile; no test tells that.",
    "peak MB/rank: the largest figure of torch's allocator in the probed steps, of all ranks and all "
    "repeats; in brackets the difference to the smallest of them. No test judges it: one moment of one "
    "rank decides. CUDA: the caching allocator. CPU: a counting allocator in front of malloc.",
    "states MB: live weights, gradients, fp32 masters and optimizer states after a backward pass, "
    "each storage once, on the rank where they are largest.",
    "sent MB/step: bytes that a rank sends per optimizer step on a ring: passes x (n - 1) / n x "
    "payload of every collective, counted in torch's dispatcher; all-reduce has two passes, the "
    "others one. A transport that emulates a collective, as gloo does reduce-scatter, sends more.",
    "expected: the same for what this implementation does: its buckets, units, paddings and repeated "
    "collectives.",
    "textbook: the same from the closed form of the strategy. Where it differs, the library does "
    "something else than the paper. It is for one micro-step per step; "
    "accumulation adds what a library gathers or reduces in each.",
    "loss diff and norm diff: the largest difference of a step to the reference, which is one "
    "process on the whole global batch: of the loss in nats per target token, of the norm relative.",
    "parity: exact, bit-equal losses, norms and final weights; tight, within what another order of "
    "summation changes; band, within what the low precision changes; diverged, beyond; unjudged, no "
    "comparison was possible. 'Parity levels' has the limits and how they were found.",
]
