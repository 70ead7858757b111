"""Power, energy and cost of one run, from what its ranks read and from the price that the user gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.forms.flops import gpu_hours, kilowatt_hours
from harness.judge.measures import rate
from harness.record import EnergyPart, Record


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Of the timed steps of one run, over all ranks; None: not known."""

    device_watts: float | None
    """Mean power of all GPUs together."""
    host_watts: float | None
    """Mean power of the processors and DRAM of all machines together."""
    kilowatt_hours: float | None
    """Per 1e9 tokens, of all that is known."""
    gpu_hours: float | None
    """Per 1e9 tokens."""
    cost: float | None
    """Per 1e9 tokens, in the currency of the price."""


def usage(record: Record) -> Usage | None:
    """None where nothing was timed: without a rate no figure says anything. No run on a CUDA stub is."""
    tokens_per_second = rate(record, "tokens")
    if not tokens_per_second:
        return None
    parts = [part for rank in record.ranks if (part := rank.energy) is not None]
    complete = len(parts) == len(record.ranks) > 0
    device = _device_watts(parts) if complete else None
    host = _host_watts(record) if complete else None
    known = [watts for watts in (device, host) if watts is not None]
    gpus = record.world.world_size if record.world.device == "cuda" else None
    hours = gpu_hours(tokens_per_second, gpus) if gpus else None
    price = record.price_per_gpu_hour
    return Usage(
        device_watts=device,
        host_watts=host,
        kilowatt_hours=kilowatt_hours(tokens_per_second, sum(known)) if known else None,
        gpu_hours=hours,
        cost=hours * price.amount if hours is not None and price is not None else None,
    )


def mean_watts(joules: float | None, seconds: float) -> float | None:
    """Energy over time."""
    return joules / seconds if joules is not None and seconds > 0 else None


def _device_watts(parts: Sequence[EnergyPart]) -> float | None:
    """Each rank has a GPU of its own."""
    watts = [mean_watts(part.device_joules, part.seconds) for part in parts]
    return None if None in watts else sum(w for w in watts if w is not None)


def _host_watts(record: Record) -> float | None:
    """Ranks on one machine read the same counters: the first of each machine counts."""
    machines: dict[str, float | None] = {}
    for rank in record.ranks:
        if rank.energy is not None:
            name = rank.energy.boot or rank.host
            machines.setdefault(name, mean_watts(rank.energy.host_joules, rank.energy.seconds))
    watts = list(machines.values())
    return None if None in watts else sum(w for w in watts if w is not None)
