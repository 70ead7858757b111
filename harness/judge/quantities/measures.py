"""What one record says about speed, memory, communication, power, energy and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from harness.forms.cost import gpu_hours, kilowatt_hours
from harness.forms.dtypes import DTYPE_BYTES
from harness.forms.network import transport_sent_bytes
from harness.forms.terms import STATE_KINDS, STEP_PHASES, ring_sent_bytes
from harness.forms.textbook import gathers_updated, textbook_sent_bytes
from harness.forms.workload import second_copy_ranks
from harness.judge.quantities.model_states import after_backward, all_kinds
from harness.record import CommunicationPart, EnergyPart, MemoryPart, RankPart, Record, StepPart
from harness.record.workload import closed_form_layout, known_strategy

STEP_MOMENTS = ("after_forward", "after_backward", "after_step")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
SCALAR_BYTES = 8


def timed_steps(record: Record) -> list[StepPart]:
    """The steps whose duration counts."""
    return record.steps[first_timed(record) :]


def first_timed(record: Record) -> int:
    """Index of the first timed step; all that follow are timed too. Without any, the number of steps.

    Steps on a CUDA stub are not timed, whatever their window: the one place that leaves its speeds out.
    """
    if record.on_stub:
        return len(record.steps)
    return next((i for i, step in enumerate(record.steps) if step.window == "timed"), len(record.steps))


def step_seconds(record: Record) -> list[float]:
    """Duration of each timed step, the slowest rank's."""
    return [step.seconds for step in timed_steps(record)]


def rate(record: Record, what: str) -> float | None:
    """`tokens` or `samples` of the timed steps over their summed duration; None without such steps."""
    steps = timed_steps(record)
    seconds: float = sum(map(attrgetter("seconds"), steps))
    counts = [count for count in map(attrgetter(what), steps) if count is not None]
    return sum(counts) / seconds if seconds and len(counts) == len(steps) else None


def counts_samples(record: Record) -> bool:
    """Whether each sample counts as one token, since the data is no text; a text has two tokens or more."""
    return bool(record.steps) and all(step.tokens == step.samples for step in record.steps)


def timed_evaluations(record: Record) -> list[tuple[int, float]]:
    """Samples and seconds of the evaluations between and after timed steps, when no probe of memory works."""
    first = first_timed(record)
    return [(p.samples, p.seconds) for p in record.eval if p.step > first and p.samples and p.seconds]


def evaluation_rate(record: Record) -> float | None:
    """Held-out samples per second of the median timed evaluation; None without one."""
    rates = [samples / seconds for samples, seconds in timed_evaluations(record)]
    return median(rates) if rates else None


def median_step_seconds(record: Record) -> float | None:
    """Median duration of a timed step."""
    seconds = step_seconds(record)
    return median(seconds) if seconds else None


def peak_bytes(record: Record) -> list[int]:
    """Per rank, the largest allocator peak within the probed steps; empty where no step was probed."""
    peaks = [
        [m.peak_bytes for m in rank.memory if m.peak_bytes is not None and m.moment in STEP_MOMENTS]
        for rank in record.ranks
    ]
    return [max(of_rank) for of_rank in peaks if of_rank]


def predicted_peak_bytes(record: Record) -> int | None:
    """Peak of torch's allocator on the rank that needs most, as predicted before the run."""
    return record.prediction.peak_bytes if record.prediction else None


def host_peak_bytes(record: Record) -> int | None:
    """Largest resident set of a rank's process, libraries included; offload shows here."""
    return max((r.host_peak_bytes for r in record.ranks if r.host_peak_bytes is not None), default=None)


def memory_at(record: Record, moment: str) -> list[MemoryPart]:
    """Of each rank the last reading at a moment; ranks that have none are left out."""
    of_ranks = ([part for part in rank.memory if part.moment == moment] for rank in record.ranks)
    return [parts[-1] for parts in of_ranks if parts]


def kinds_at(record: Record, moment: str) -> dict[str, int]:
    """Live bytes by kind on the rank that holds most, when the moment was last recorded; {} if never."""
    known = [(part.allocated_bytes or 0, part.kinds) for part in memory_at(record, moment) if part.kinds]
    return max(known, key=lambda pair: (pair[0], sum(pair[1].values())), default=(0, {}))[1]


def model_state_bytes(record: Record) -> int | None:
    """Weights, gradients, masters and optimizer states after a backward pass, the largest rank's.

    In the last probed step: before the first update there is no optimizer state.
    """
    sizes = [
        sum(all_kinds(moment).get(kind, 0) for kind in STATE_KINDS)
        for rank in record.ranks
        if (moment := after_backward(rank)) is not None
    ]
    return max(sizes) if sizes else None


def sent_bytes_per_step(record: Record, rows: Sequence[CommunicationPart] | None = None) -> float | None:
    """Ring bytes that a rank sends per probed step, averaged over the ranks; of these collectives, or all."""
    return _per_step(record, lambda row: ring_sent_bytes(row.op, row.payload_bytes, row.group_size), rows)


def transport_bytes_per_step(record: Record) -> float | None:
    """The same as the transport really moves it, where it emulates a collective by another."""
    transport = record.world.collectives
    return _per_step(
        record, lambda row: transport_sent_bytes(transport, row.op, row.payload_bytes, row.group_size)
    )


def _per_step(
    record: Record,
    sent: Callable[[CommunicationPart], float],
    rows: Sequence[CommunicationPart] | None = None,
) -> float | None:
    probed = record.windows.probed if record.windows else 0
    if not probed or not record.ranks or not all_ranks_counted(record):
        return None
    counted = record.comm if rows is None else rows
    total = sum(sent(row) for row in counted if row.phase in STEP_PHASES)
    return total / probed / len(record.ranks)


def all_ranks_counted(record: Record) -> bool:
    """Whether every rank wrote what it counted; a rank that was killed did not, and zero would be wrong."""
    if record.status in ("ok", "diverged"):
        return True
    return len({row.rank for row in record.comm}) == record.world.world_size


def textbook_bytes_per_step(record: Record) -> float | None:
    """What the textbook says that a rank sends per step; None for a strategy it does not know."""
    effective = record.backend.effective
    strategy = known_strategy(record)
    if effective is None or strategy is None or record.world.dimensions:
        return None
    weights = DTYPE_BYTES.get(effective.parameter_dtype)
    reduced = DTYPE_BYTES.get(effective.reduce_dtype or effective.parameter_dtype)
    if weights is None or reduced is None:
        return None
    return textbook_sent_bytes(
        strategy.sharding,
        effective.parameter_count,
        record.world.world_size,
        weight_bytes=weights,
        reduce_bytes=reduced,
        shard_size=record.backend.shard_size,
        trained=closed_form_layout(record.layout).trained_count
        if record.layout and record.layout.frozen
        else None,
        after_update=gathers_updated(strategy),
        second_copy_ranks=second_copy_ranks(record.backend.options),
    )


def _reduces(row: CommunicationPart) -> bool:
    """Whether these collectives add up gradients."""
    of_gradients = row.phase in ("backward", "step") and row.op in REDUCTIONS and not row.of_job
    return of_gradients and row.group_size > 1


def reduced_bytes(record: Record) -> int:
    """Payload of reductions after forward passes in the probed steps, the largest rank's."""
    sizes: dict[int, int] = {}
    for row in record.comm:
        if _reduces(row):
            sizes[row.rank] = sizes.get(row.rank, 0) + row.payload_bytes
    return max(sizes.values(), default=0)


OF_PARTS = {"complex64": "float32", "complex128": "float64"}
"""Dtype of the real and imaginary parts of complex numbers."""


def reduced_dtypes(record: Record) -> list[str]:
    """Dtypes in which gradients crossed the wire in the probed steps, sorted; empty: nothing crossed.

    What adds up to less than a hundredth of the bytes is norms and flags, not gradients; so are scalars, and
    integers, such as DDP's map of used parameters. Along 'tensor' ranks add up activations and their
    gradients. A complex number is two real ones, as which DDP sends it.
    """
    sizes: dict[str, int] = {}
    for row in record.comm:
        if row.payload_bytes <= SCALAR_BYTES * row.calls or row.role == "tensor":
            continue
        if row.dtype.startswith(("int", "uint", "bool")):
            continue
        if _reduces(row):
            dtype = OF_PARTS.get(row.dtype, row.dtype)
            sizes[dtype] = sizes.get(dtype, 0) + row.payload_bytes
    total = sum(sizes.values())
    return sorted(dtype for dtype, size in sizes.items() if size * 100 >= total)


@dataclass(frozen=True, kw_only=True)
class WithoutGradient:
    """Parameters that in one step got a gradient elsewhere, and none here."""

    step: int
    names: list[str]
    ranks: list[int]
    """Those without; if these are all, elsewhere is in the reference and in earlier steps."""


def idle_on_some_ranks(record: Record) -> list[WithoutGradient]:
    """By the first step in which a parameter got a gradient on one rank and none on these.

    Where all ranks hold the same parameters.
    """
    if record.world.data_size < record.world.world_size:
        return []
    found: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    seen: set[str] = set()
    for step, of_ranks in _changes(record.ranks):
        everywhere: set[str] = set.intersection(*of_ranks)
        some = set().union(*of_ranks) - everywhere
        for name in sorted(some - seen):
            ranks = (part.rank for part, names in zip(record.ranks, of_ranks, strict=True) if name in names)
            found.setdefault((step, tuple(ranks)), []).append(name)
        seen |= some
    return [
        WithoutGradient(step=step, names=names, ranks=list(ranks)) for (step, ranks), names in found.items()
    ]


def gradient_lost(reference: Record, record: Record) -> WithoutGradient | None:
    """Parameters that every rank gave a gradient at first and none does from a step on.

    Only what the reference always gives one; nothing where some ranks have idle parameters: there data
    decide.
    """
    there = [names for part in reference.ranks for names in part.without_gradient.values()]
    if not there or None in there or record.world.data_size < record.world.world_size:
        return None
    steps = [(step, of_ranks[0]) for step, of_ranks in _changes(record.ranks)]
    if not steps or idle_on_some_ranks(record):
        return None
    lost = steps[-1][1] - steps[0][1] - {name for names in there for name in names or ()}
    if not lost:
        return None
    # Since when all of them are missing.
    first = next(n for n in range(len(steps)) if all(lost <= missing for _, missing in steps[n:]))
    ranks = [part.rank for part in record.ranks]
    return WithoutGradient(step=steps[first][0], names=sorted(lost), ranks=ranks)


def _changes(ranks: Sequence[RankPart]) -> Iterator[tuple[int, list[set[str]]]]:
    """Each step from which on other parameters lack a gradient, with those of every rank, as far as known."""
    missing: list[list[str] | None] = [None] * len(ranks)
    for step in sorted({step for part in ranks for step in part.without_gradient}):
        missing = [
            part.without_gradient.get(step, before) for part, before in zip(ranks, missing, strict=True)
        ]
        known = [set(names) for names in missing if names is not None]
        if len(known) < len(ranks):
            return
        yield step, known


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
