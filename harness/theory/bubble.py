"""The share of a pipeline's passes in which a rank waits because of the schedule alone."""

from __future__ import annotations


def bubble_share(*, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """(p - 1) / (v m + p - 1) of the time of the passes, for p ranks of v stages and m micro-batches.

    GPipe and 1F1B have v = 1 and the same share: 1F1B saves memory, not time. All stages are taken to last
    equally long, a message no time. Sources: GPipe (arXiv 1811.06965, section 2.3); interleaved stages:
    Narayanan et al. (arXiv 2104.04473, section 2.2), whose ratio to the ideal time this turns into a share.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)
