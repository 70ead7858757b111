"""How far communication could hide behind computing: the ratios of decision guides.

Communication time over computing time of one step with DP ranks, P parameters, T tokens per rank and step,
peak F in FLOP/s and peak bandwidth B in bytes/s. Above 1 communication is exposed even under perfect overlap.
Source: Nouamane Tazi et al., 'The Ultra-Scale Playbook', Hugging Face 2025, sections on data parallelism and
ZeRO, in the form of CINECA's course on FSDP. They count two bytes per element, peaks instead of measured
rates, no latency and no recomputation. The first two carry P, which is a time over a time only if P cancels
against computing of 6 P T FLOPs: read them as an order of strategies and `time_ratio` as a ratio.
"""

from __future__ import annotations

from harness.backends.strategy import StrategyKind


def replicated_ratio(ranks: int, parameters: int, tokens: int, peak_flops: float, bandwidth: float) -> float:
    """DDP and ZeRO-1: (DP - 1) P F / (2 B T DP)."""
    return (ranks - 1) * parameters * peak_flops / (2 * bandwidth * tokens * ranks)


def gradient_sharded_ratio(
    ranks: int, parameters: int, tokens: int, peak_flops: float, bandwidth: float
) -> float:
    """ZeRO-2: (DP - 1) P F / (4 B T DP)."""
    return replicated_ratio(ranks, parameters, tokens, peak_flops, bandwidth) / 2


def parameter_sharded_ratio(
    ranks: int, sequence_length: int, micro_batch_size: int, peak_flops: float, bandwidth: float
) -> float:
    """ZeRO-3 and FSDP: (DP - 1) F / (2 seq mbs B)."""
    return (ranks - 1) * peak_flops / (2 * sequence_length * micro_batch_size * bandwidth)


def time_ratio(sent_bytes: float, parameters: int, tokens: int, peak_flops: float, bandwidth: float) -> float:
    """Communication over computing, both at their peaks: (bytes / B) / (6 P T / F).

    sent_bytes: what a rank sends per step; tokens: of a rank and step. For DDP with 2-byte gradients and a
    ring it is 2 (DP - 1) F / (3 DP B T): P cancels.
    """
    return sent_bytes / bandwidth * peak_flops / (6 * parameters * tokens)


def guide_ratio(
    strategy: StrategyKind,
    *,
    ranks: int,
    parameters: int,
    sequence_length: int,
    micro_batch_size: int,
    accumulation_steps: int,
    peak_flops: float,
    bandwidth: float,
) -> float:
    """What the guide prints for a strategy; T counts all micro-steps of a rank, since DDP reduces once.

    For hybrid sharding `ranks` are those of a shard group. One rank communicates nothing: 0.
    """
    tokens = sequence_length * micro_batch_size * accumulation_steps
    if strategy.facts.reshards or strategy.stage == 3:
        return parameter_sharded_ratio(ranks, sequence_length, micro_batch_size, peak_flops, bandwidth)
    ratio = gradient_sharded_ratio if strategy.stage == 2 else replicated_ratio
    return ratio(ranks, parameters, tokens, peak_flops, bandwidth)
