"""What is counted of a run, and the closed forms that it is held to: states, traffic, memory, times, FLOP."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from operator import attrgetter
from statistics import fmean, median
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from harness.backends.mesh import Mesh
from harness.backends.pipeline.cut import Cut
from harness.forms import families, pipeline, terms
from harness.forms.layout import DTYPE_BYTES
from harness.forms.network import transport_sent_bytes
from harness.forms.optimizers import OWN_STATES
from harness.forms.textbook import (
    ModelGeometry,
    TermDifference,
    find_peak,
    gathers_updated,
    gpu_hours,
    hardware_flops_per_token,
    kilowatt_hours,
    least_flops_per_token,
    model_flops_per_token,
    term_differences,
    textbook_collectives,
    textbook_sent_bytes,
    textbook_states,
)
from harness.forms.workload import ELSEWHERE, ORDINARY_STEP, Workload, second_copy_ranks
from harness.judge.distance import Series, series
from harness.judge.statistics import percentile_95, steady_from
from harness.judge.wording import CellName
from harness.nested import grouped, totals
from harness.record import (
    CommunicationPart,
    MemoryPart,
    OverlapPart,
    ProcessorPart,
    RankPart,
    Record,
    StepPart,
)
from harness.record.run import PER_TOKEN
from harness.record.workload import complex_parameters, known_strategy, of_record

ADAM_CLASSES = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
"""Optimizers whose states the closed forms know, whatever library they are of."""


def unjudged_amounts(record: Record) -> tuple[str, ...]:
    """'bytes' and 'memory' of a run that succeeded under a strategy without a closed form; else nothing.

    A third party's backend that claims no strategy and brings no form, or a script whose strategy is unknown.
    """
    strategy = known_strategy(record)
    known = strategy is not None and strategy.family in families.CLOSED_FORMS
    unjudged = record.status == "ok" and not known and record.backend.own_forms is None
    return ("bytes", "memory") if unjudged else ()


def expected_states(record: Record, rank: int) -> terms.ModelStates | None:
    """The closed form for one rank: of its family, or its own; None: there is none of all that it holds."""
    found = derived_states(record, rank)
    return None if found is None or found.unknown is not None else found


def derived_states(record: Record, rank: int) -> terms.ModelStates | None:
    """The closed form for one rank, without the optimizer's states where these are not known."""
    if record.backend.own_forms is not None:
        return record.backend.own_forms.states[rank]
    workload = of_record(record, rank)
    if workload is None or workload.strategy.family not in families.CLOSED_FORMS:
        return None
    if families.underived(workload) is not None:
        return None
    form, effective = families.model_states(workload), record.backend.effective
    if record.observation is not None and effective is not None:  # only Adam's two moments are known
        seen = [name.rpartition(".")[2] for name in effective.optimizer.split(" and ")]
        amsgrad = any(group.get("amsgrad") for group in effective.optimizer_groups or ())
        if amsgrad or any(name not in ADAM_CLASSES for name in seen):
            others = tuple(term for term in form.terms if term.kind != "optimizer")
            return replace(form, terms=others, unknown=OWN_STATES)
    return form


def expected_volume(record: Record, workload: Workload) -> terms.Volume | None:
    """What the run should communicate by its family, or by its own closed form; None: there is none.

    Own forms were evaluated before the run: they say nothing of one that ended before its probed steps.
    """
    own, resumed = record.backend.own_forms, record.resumed
    # Closed forms know the first steps of a training, not those of a run that continues one.
    into_probed_steps = resumed is not None and min(workload.steps, default=0) - resumed.step < ORDINARY_STEP
    if own is not None:
        return own.volume if own.steps == workload.steps else None
    if workload.strategy.family not in families.CLOSED_FORMS or into_probed_steps:
        return None
    return families.collectives(workload)


STATES_TOLERANCE = 1e-3
"""Relative to the closed form. The forms are exact; this leaves room for a library's next version."""


@dataclass(frozen=True, kw_only=True)
class RankStates:
    """One rank's bytes by kind after the backward pass of its last probed step."""

    record: Record
    rank: int
    step: int
    measured: dict[str, int]

    @cached_property
    def expected(self) -> terms.ModelStates | None:
        """None: no closed form is known, no layout in the record, or the first step, before Adam's states."""
        return expected_states(self.record, self.rank) if self.step > 0 else None

    @property
    def measured_bytes(self) -> int:
        return sum(self.measured.get(kind, 0) for kind in terms.STATE_KINDS)

    def is_off(self, kind: str) -> bool:
        assert self.expected is not None
        form, measured = self.expected.kinds().get(kind, 0), self.measured.get(kind, 0)
        if kind == "gradients" and measured < form and self.record.observation is not None:
            # Which parameters a step of a script uses is not traced.
            if (self.record.backend.native_config or {}).get("find_unused_parameters"):
                return False
        return abs(measured - form) > STATES_TOLERANCE * form

    @property
    def off(self) -> list[str]:
        """Kinds of model states that are not as calculated; none without a closed form."""
        return [kind for kind in terms.STATE_KINDS if self.expected is not None and self.is_off(kind)]


def rank_states(record: Record) -> list[RankStates]:
    """Every rank that measured kinds after a backward pass, in order: in the last probed step."""
    probed = [
        (part.rank, [m for m in part.memory if m.moment == "after_backward" and m.kinds is not None])
        for part in record.ranks
    ]
    return [
        RankStates(record=record, rank=rank, step=moments[-1].step, measured=moments[-1].all_kinds())
        for rank, moments in probed
        if moments
    ]


MOST_UNDESCRIBED = 64
"""Ranks for which closed forms are worked out though none measured anything."""


def largest(states: list[RankStates]) -> RankStates | None:
    return max(states, key=lambda of_rank: of_rank.measured_bytes, default=None)


def ranks_described(record: Record) -> range:
    """The ranks of a run; the first of one that claims more than it describes."""
    return range(min(record.world.world_size, max(len(record.ranks), MOST_UNDESCRIBED)))


def expected_model_state_bytes(record: Record) -> int | None:
    """The largest rank's closed form; None where there is none."""
    forms = (expected_states(record, rank) for rank in ranks_described(record))
    return max((form.model_state_bytes for form in forms if form is not None), default=None)


def textbook(record: Record) -> dict[str, float] | None:
    """What the ZeRO paper counts per kind; None for an unknown strategy, size or optimizer."""
    effective, strategy = record.backend.effective, known_strategy(record)
    precision = record.job.training.held_precision
    if effective is None or strategy is None or record.world.dimensions or precision is None:
        return None
    if record.job.optimizer.kind == "own":
        return None
    parts = record.world.mesh.model_parts
    shards = parts if parts > 1 else record.backend.shard_size or record.world.world_size
    return textbook_states(
        strategy.stage, effective.parameter_count, shards, precision, trained=_trained_count(record),
        moments=record.job.optimizer.moments,
    )  # fmt: skip


def _trained_count(record: Record) -> int | None:
    """None: all parameters are trained."""
    layout = record.layout
    return layout.trained_count if layout and layout.frozen else None


STEP_MOMENTS = ("after_forward", "after_backward", "after_step")
COARSE = 0.01
"""Share by which a CPU rank may count more after its probed steps: blocks as the C library rounds them."""
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
SCALAR_BYTES = 8


def timed_steps(record: Record) -> list[StepPart]:
    return record.steps[first_timed(record) :]


def first_timed(record: Record) -> int:
    """Index of the first timed step; all that follow are timed too. Without any, the number of steps.

    Steps on a CUDA stub are not timed, whatever their window: the one place that leaves its speeds out.
    """
    if record.on_stub:
        return len(record.steps)
    return next((i for i, step in enumerate(record.steps) if step.window == "timed"), len(record.steps))


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


def predicted_peak_bytes(record: Record) -> int | None:
    """Peak of torch's allocator on the rank that needs most, as predicted before the run."""
    return record.prediction.peak_bytes if record.prediction else None


def host_peak_bytes(record: Record) -> int | None:
    """Largest resident set of a rank's process, libraries included; offload shows here."""
    return max((r.host_peak_bytes for r in record.ranks if r.host_peak_bytes is not None), default=None)


def probed_peak(part: RankPart) -> int | None:
    """A rank's largest allocator peak within its probed steps; None: no step was probed."""
    peaks = (m.peak_bytes for m in part.memory if m.peak_bytes is not None and m.moment in STEP_MOMENTS)
    return max(peaks, default=None)


def after_probed(record: Record, of_steps: Sequence[int | None]) -> list[tuple[int, int]]:
    """(step, bytes) of the steps after the probed ones, of a list with a value per step."""
    windows = [step.window for step in record.steps]
    if "probed" not in windows:
        return []
    first = len(windows) - windows[::-1].index("probed")
    pairs = zip(record.steps[first:], of_steps[first:], strict=False)
    return [(step.step, size) for step, size in pairs if size is not None]


WATCHDOG_SECONDS = 1.0
"""Ten of its rounds."""


def run_peak(record: Record, part: RankPart) -> int | None:
    """A rank's largest allocator peak of any step; None: no step was probed.

    Other steps count where one needs more than these by more than chance, or all that follow do.
    """
    probed = probed_peak(part)
    if probed is None:
        return None
    peaks = zip(record.steps, part.step_peak_bytes, strict=False)
    most, step = max(((size, of.step) for of, size in peaks if size is not None), default=(0, 0))
    least = min((size for _, size in after_probed(record, part.step_peak_bytes)), default=0)
    coarse = COARSE * probed if record.world.device == "cpu" else 0
    counts = max(least, most - held_by_transport(record, step)) > probed + coarse
    return most if counts else probed


def held_by_transport(record: Record, step: int | None = None) -> int:
    """Bytes that a transport may still hold at one moment or rank and not at another.

    gloo's threads: of one call, with the part that a rank gives or gets. NCCL, in a step that was not probed:
    what DDP reduced since the watchdog last let go of it (`release_finished_collectives` waits before probed
    steps); on a busy machine it may come as late as `WATCHDOG_SECONDS`.
    """
    in_steps = (part for part in record.comm if part.phase in terms.STEP_PHASES)
    if record.world.collectives == "gloo":
        ends = ("gather", "scatter")
        sizes = ((p.largest_bytes or 0) * (1 + p.op.endswith(ends) / p.group_size) for p in in_steps)
        return record.once("held by gloo", lambda: int(max(sizes, default=0)))
    probed = record.probed_steps
    if record.world.collectives != "nccl" or step is None or not probed:
        return 0
    by_rank: Counter[int] = Counter()
    for part in in_steps:
        if part.op == "all_reduce" and part.phase == "backward":
            by_rank[part.rank] += part.payload_bytes
    steps, seconds = 0, 0.0
    for n in range(bisect_right(record.steps, step, key=attrgetter("step")) - 1, -1, -1):
        if record.steps[n].window == "probed" or seconds > WATCHDOG_SECONDS:
            break
        steps, seconds = steps + 1, seconds + record.steps[n].seconds
    return steps * max(by_rank.values(), default=0) // probed


def memory_at(record: Record, moment: str) -> list[MemoryPart]:
    """Last reading of each rank at a moment; ranks that have none are left out."""
    of_ranks = ([part for part in rank.memory if part.moment == moment] for rank in record.ranks)
    return [parts[-1] for parts in of_ranks if parts]


def kinds_at(record: Record, moment: str) -> dict[str, int]:
    """Live bytes by kind on the rank that holds most, when the moment was last recorded; {} if never."""
    known = [(part.allocated_bytes or 0, part.kinds) for part in memory_at(record, moment) if part.kinds]
    return max(known, key=lambda pair: (pair[0], sum(pair[1].values())), default=(0, {}))[1]


def model_state_bytes(record: Record) -> int | None:
    """Weights, gradients, masters and optimizer states after a backward pass, the largest rank's."""
    return max((states.measured_bytes for states in rank_states(record)), default=None)


def sent_bytes_per_step(record: Record, rows: Sequence[CommunicationPart] | None = None) -> float | None:
    """Ring bytes that a rank sends per probed step, averaged over the ranks; of these collectives, or all.

    Of a script with what it exchanges between steps.
    """
    return _per_step(
        record, lambda row: terms.ring_sent_bytes(row.op, row.payload_bytes, row.group_size), rows
    )


def transport_bytes_per_step(record: Record) -> float | None:
    """Bytes sent per probed step as the transport moves them, where it emulates a collective by another."""
    transport = record.world.collectives
    return _per_step(
        record, lambda row: transport_sent_bytes(transport, row.op, row.payload_bytes, row.group_size)
    )


def _per_step(
    record: Record,
    sent: Callable[[CommunicationPart], float],
    rows: Sequence[CommunicationPart] | None = None,
) -> float | None:
    probed = record.probed_steps
    if not probed or not record.ranks or not all_ranks_counted(record):
        return None
    counted = record.comm if rows is None else rows
    total = sum(sent(row) for row in counted if row.phase in (*terms.STEP_PHASES, terms.BETWEEN))
    return total / probed / len(record.ranks)


def all_ranks_counted(record: Record) -> bool:
    """Whether every rank wrote what it counted; a rank that was killed did not, and zero would be wrong."""
    if record.status in ("ok", "diverged"):
        return True
    return len({row.rank for row in record.comm}) == record.world.world_size


def loss_unit(record: Record) -> str:
    """Unit of a record's losses; '' where a script's is not per token."""
    seen = record.observation
    return "nats per token" if seen is None or seen.loss.endswith(PER_TOKEN) else ""


def between_steps(record: Record) -> dict[tuple[str, str], float]:
    """Payload per probed step that rank 0 of a script exchanges between steps, by who does and operation."""
    probed = record.probed_steps
    return totals(
        ((row.by, row.op), row.payload_bytes / probed)
        for row in record.comm
        if probed and row.phase == terms.BETWEEN and row.rank == 0 and row.group_size > 1
    )


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
        trained=_trained_count(record),
        after_update=gathers_updated(strategy),
        second_copy_ranks=second_copy_ranks(record.backend.options),
    )


def _reduces(row: CommunicationPart) -> bool:
    """Whether these collectives add up gradients; along 'tensor' ranks add up activations and theirs."""
    of_gradients = row.phase in ("backward", "step") and row.op in REDUCTIONS and not row.of_job
    return of_gradients and row.group_size > 1 and row.role != "tensor"


def reduced_bytes(record: Record) -> int:
    """Payload of reductions after forward passes in the probed steps, the largest rank's."""
    sizes = totals((row.rank, row.payload_bytes) for row in record.comm if _reduces(row))
    return max(sizes.values(), default=0)


OF_PARTS = {"complex64": "float32", "complex128": "float64"}
"""Dtype of the real and imaginary parts of complex numbers."""


def reduced_dtypes(record: Record) -> list[str]:
    """Dtypes in which gradients crossed the wire in the probed steps, sorted; empty: nothing crossed.

    What adds up to less than a hundredth of the bytes is norms and flags, not gradients; so are scalars, and
    integers, such as DDP's map of used parameters. A complex number is two real ones, as which DDP sends it.
    """
    sizes = totals(
        (OF_PARTS.get(row.dtype, row.dtype), row.payload_bytes)
        for row in record.comm
        if row.payload_bytes > SCALAR_BYTES * row.calls
        and not row.dtype.startswith(("int", "uint", "bool"))
        and _reduces(row)
    )
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
    """Parameters that got a gradient on one rank and none on others, by the first step of that.

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


def usage(record: Record) -> dict[str, Any]:
    """Of the timed steps, over all GPUs: mean watts; kWh, GPU-hours and cost per 1e9 tokens; None: unknown.

    {} where nothing was timed: without a rate no figure says anything. No run on a CUDA stub is.
    """
    tokens_per_second = rate(record, "tokens")
    if not tokens_per_second:
        return {}
    parts = [part for rank in record.ranks if (part := rank.energy) is not None]
    complete = len(parts) == len(record.ranks) > 0
    watts = [mean_watts(part.device_joules, part.seconds) for part in parts]  # of a GPU of each rank
    device = sum(w for w in watts if w is not None) if complete and None not in watts else None
    gpus = record.world.world_size if record.world.device == "cuda" else None
    hours = gpu_hours(tokens_per_second, gpus) if gpus else None
    price = record.price_per_gpu_hour
    return {
        "device_watts": device,
        "kilowatt_hours": kilowatt_hours(tokens_per_second, device) if device is not None else None,
        "gpu_hours": hours,
        "cost": hours * price.amount if hours is not None and price is not None else None,
    }


def mean_watts(joules: float | None, seconds: float) -> float | None:
    return joules / seconds if joules is not None and seconds > 0 else None


Key = tuple[str, str, str, str]
"""(phase, collective, dtype, role of the group, or ELSEWHERE)."""
CLAIM_TOLERANCE = 0.01
"""Of the payload of the probed steps. Implementations of one strategy differ in norms, flags and handshakes,
and in whether they broadcast buffers, but not in gradients and weights."""


@dataclass(frozen=True)
class VolumeDifference:
    """Payload of one kind of collective that is not as expected, on the rank where it differs most."""

    phase: str
    op: str
    dtype: str
    role: str
    _: KW_ONLY
    rank: int
    measured_bytes: int
    expected_bytes: int
    group_ranks: tuple[int, ...] = ()
    """Ranks of that rank's group; () where the record does not say, or nothing was measured."""

    @property
    def group(self) -> str:
        """The role of the group, or its ranks where it has none."""
        return f"ranks {', '.join(map(str, self.group_ranks))}" if self.role == ELSEWHERE else self.role


def why_unknown(record: Record) -> str | None:
    """Why nothing, or nothing of the steps, is expected of a record; None: everything is."""
    if not any(step.window == "probed" for step in record.steps):
        return "no step was probed (measure.probed_steps)"
    if record.layout is None or record.backend.effective is None:
        return "the record does not describe the model"
    if names := complex_parameters(record.layout):
        return f"{names[0]} is complex, which libraries count as one number here and as two there"
    pair = volume_of(record)
    if pair is None:
        return f"{record.backend.name} has no closed form here"
    unknown = pair[1].unknown
    return "execution depends on data" if unknown and record.layout.depends_on_data else unknown


def volume_of(record: Record) -> tuple[Workload, terms.Volume] | None:
    """What the record's run is expected to communicate; None for a backend or run without an answer."""
    workload = of_record(record) if record.backend.effective is not None else None
    if workload is None or not workload.steps:
        return None
    volume = expected_volume(record, workload)
    return None if volume is None else (workload, volume)


def measured_payload(record: Record, workload: Workload) -> dict[int, dict[Key, int]]:
    """Payload bytes by rank and kind of collective, over the probed steps or the whole run."""
    by_rank = grouped((row.rank, row) for row in record.comm if not row.of_job)
    return {
        rank: totals((_key(row, workload), row.payload_bytes) for row in by_rank.get(rank, []))
        for rank in dict.fromkeys([*(rank.rank for rank in record.ranks), *by_rank])
    }


def _key(row: CommunicationPart, workload: Workload) -> Key:
    """A role holds for the ranks that it has in this workload; a record that names no ranks is believed."""
    ranks = sorted(row.group_ranks)
    known = row.role != ELSEWHERE and len(ranks) in (0, workload.group_size(row.role))
    known = known and (not ranks or ranks == workload.group_ranks(row.role, row.rank))
    return row.phase, row.op, row.dtype, row.role if known else ELSEWHERE


def expected_payload(volume: terms.Volume, mesh: Mesh | None = None) -> dict[Key, int]:
    """Payload bytes that every rank is expected to hand to each kind of collective."""
    named = mesh.canonical if mesh is not None and mesh.shares_samples else str
    return totals(((c.phase, c.op, c.dtype, named(c.role)), c.payload_bytes) for c in volume.collectives)


def is_derived(volume: terms.Volume, phase: str, dtype: str) -> bool:
    """Whether a volume says what collectives of a phase and dtype move, be it nothing: within steps only."""
    if volume.unknown or phase not in terms.STEP_PHASES:
        return False
    return not any(part.covers(phase, dtype) for part in volume.underived)


def volume_differences(record: Record) -> list[VolumeDifference] | None:
    """Every kind of collective of the steps whose payload is not as expected; None where nothing is."""
    pair = volume_of(record)
    if pair is None:
        return None
    workload, volume = pair
    measured = measured_payload(record, workload)
    volumes = _volume_by_rank(record, volume, measured)
    expected = {rank: expected_payload(of_rank, workload.mesh) for rank, of_rank in volumes.items()}
    everything = {key for sums in (*expected.values(), *measured.values()) for key in sums}
    kinds = {key for key in everything if is_derived(volume, key[0], key[2])}
    rows_of = grouped(((row.rank, _key(row, workload)), row) for row in record.comm)
    several = {key for (_, key), rows in rows_of.items() if any(row.group_size > 1 for row in rows)}
    alone = {key for _, key in rows_of} - several  # sends nothing, whoever calls it
    # Of a single rank that is all, however often its library calls.
    kinds -= alone - {key for sums in expected.values() for key in sums if record.world.world_size > 1}
    found = []
    for key in sorted(kinds):
        rank, sent, wanted = max(
            ((rank, sums.get(key, 0), expected[rank].get(key, 0)) for rank, sums in measured.items()),
            key=lambda found: abs(found[1] - found[2]),
        )
        less, more = _leeway(record, volumes[rank], key) if sent != wanted else (0, 0)
        if key[0] == "forward":  # what passes between a script's steps gathered may still be there
            less += measured[rank].get((terms.BETWEEN, *key[1:]), 0)
        rows = rows_of.get((rank, key), [])
        if record.observation:  # single numbers of a script's own, as Join's
            more += sum(row.payload_bytes for row in rows if 0 < (row.largest_bytes or 0) <= SCALAR_BYTES)
        if not wanted - less <= sent <= wanted + more:
            of = tuple(sorted(rows[0].group_ranks)) if rows else ()
            found.append(
                VolumeDifference(*key, rank=rank, measured_bytes=sent, expected_bytes=wanted, group_ranks=of)
            )
    if record.backend.claim is None or record.backend.own_forms is not None:
        return found
    return _whole(found, {key: rows[0] for (_, key), rows in rows_of.items()})


PARTS_OF_REDUCTION = ("reduce_scatter", "all_gather")


def _whole(found: list[VolumeDifference], rows: dict[Key, CommunicationPart]) -> list[VolumeDifference]:
    """Without all-reduces that ran as a reduce-scatter and an all-gather of equal bytes, but for padding."""
    for reduced in [one for one in found if one.op == "all_reduce"]:
        place = reduced.dtype, reduced.role
        parts = [
            one
            for one in found
            if one.op in PARTS_OF_REDUCTION and (one.phase, one.dtype, one.role) == (reduced.phase, *place)
        ]
        lacks = reduced.expected_bytes - reduced.measured_bytes
        surplus = {one.measured_bytes - one.expected_bytes - lacks for one in parts}
        if lacks > 0 and len(parts) == 2 and len(surplus) == 1 and min(surplus) >= 0:
            row = rows[reduced.phase, PARTS_OF_REDUCTION[0], *place]
            if surplus.pop() <= row.calls * (row.group_size - 1) * (DTYPE_BYTES.get(row.dtype) or 0):
                found = [one for one in found if one is not reduced and one not in parts]
    return found


def _volume_by_rank(record: Record, of_first: terms.Volume, ranks: Iterable[int]) -> dict[int, terms.Volume]:
    """What each rank is expected to communicate: the same as rank 0, unless ranks share samples."""
    found: dict[int, terms.Volume] = {}
    for rank in ranks:
        workload = of_record(record, rank) if record.world.dimensions and rank else None
        volume = expected_volume(record, workload) if workload is not None else None
        found[rank] = volume or of_first
    return found


def _leeway(record: Record, volume: terms.Volume, key: Key) -> tuple[int, int]:
    """Payload bytes of a kind that may be missing, or extra: none, unless the strategy is claimed."""
    if record.backend.claim is None or record.backend.own_forms is not None:
        return 0, 0
    buffers = expected_payload(
        terms.Volume(collectives=tuple(c for c in volume.collectives if c.term == terms.BUFFERS))
    )
    small = int(CLAIM_TOLERANCE * sum(expected_payload(volume).values()))
    return buffers.get(key, 0) + small, small


def expected_sent_bytes_per_step(record: Record) -> float | None:
    """Ring bytes that a rank is expected to send per probed step; as counted those of the job's own code, and
    what a script exchanges between steps.

    Mean over the ranks; None: not known.
    """
    pair = volume_of(record)
    if pair is None:
        return None
    volumes = _volume_by_rank(record, pair[1], ranks_described(record))
    sent = [sent_per_step(pair[0], volume) for volume in volumes.values()]
    of_job = sent_bytes_per_step(record, [r for r in record.comm if r.of_job or r.phase == terms.BETWEEN])
    return None if None in sent else fmean(part for part in sent if part is not None) + (of_job or 0)


def sent_per_step(workload: Workload, volume: terms.Volume) -> float | None:
    """Ring bytes that a rank sends per step of the window; None where the volume of a step is not known."""
    if volume.unknown or volume.underived:
        return None
    total = sum(c.sent_bytes(workload) for c in volume.collectives if c.phase in terms.STEP_PHASES)
    return total / len(workload.steps)


def textbook_differences(record: Record) -> list[TermDifference] | None:
    """Expected minus textbook, term by term; None where one of them is not known."""
    pair, effective = volume_of(record), record.backend.effective
    strategy = known_strategy(record)
    if pair is None or pair[1].unknown or effective is None or strategy is None or strategy.facts.cuts_layers:
        return None
    if record.world.dimensions:
        return None  # the papers count data-parallel strategies
    workload, volume = pair
    weights = effective.parameter_dtype
    textbook = textbook_collectives(
        workload, weight_dtype=weights, reduce_dtype=effective.reduce_dtype or weights
    )
    return term_differences(workload, volume, textbook)


PERSISTENT_RUNS = 3
"""What so many runs show, and all there are, is no chance of one of them."""
BEYOND_UNSEEN = 2.0
"""Fewer runs must show more than what nobody counts: a neighbour on the other hardware thread of a core,
caches, clock rates. Sharing a core's hardware threads at most halves the speed."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Processor time that went to others than the ranks, from the first timed step to the end of training."""

    seconds: float
    """The stretch that was watched."""
    other_cores: float
    """Processors that anything but the ranks used, on the machine where most were."""
    lost_seconds: float
    """By which it may have made the timed steps longer."""
    lost_by_rank: Sequence[float]
    """By which it may have made each rank slower, ranks in the order of the record."""
    lost_share: float
    """Of the stretch, what was taken at the least: from the rank that lost most, nothing counted twice."""


def is_beyond_noise(factors: Sequence[float]) -> bool:
    """Whether runs that all show the same thing, by these factors, show more than noise of their machine."""
    return bool(factors) and (len(factors) >= PERSISTENT_RUNS or min(factors) > BEYOND_UNSEEN)


def _held_up_seconds(part: ProcessorPart) -> float:
    """At the most: any of what the hypervisor took may have been this rank's."""
    return part.waiting_seconds + part.machine_stolen_seconds


def _lost_seconds(part: ProcessorPart, parts: Sequence[ProcessorPart]) -> float:
    """Seconds that one rank's threads lost: waiting for other programs, and their share of stolen time."""
    busy = sum(part.machine_busy_seconds for part in parts) / len(parts)
    stolen = sum(part.machine_stolen_seconds for part in parts) / len(parts)
    ranks = sum(part.process_seconds for part in parts)
    share = part.process_seconds / max(busy, ranks) if ranks else 0.0
    return min(part.waiting_seconds, max(0.0, busy - ranks)) + stolen * share


PHASES = ("forward", "backward", "step")
WAITING = "waiting"
"""For other stages of a pipeline: in none of the phases."""
Seconds: TypeAlias = npt.NDArray[np.float64]
"""A line per rank and a column per timed step."""


WHOLE = "whole step"
DATA = "data"


@dataclass(frozen=True, kw_only=True)
class Timings:
    """How long each rank took for each timed step and for its parts."""

    seconds: dict[str, Seconds]
    """Of the whole step, of fetching its batches, and of the phases that every rank timed."""
    medians: dict[str, list[float]]
    """The same over the steps, a value per rank."""

    @property
    def steps(self) -> Seconds:
        return self.seconds[WHOLE]

    @property
    def data(self) -> Seconds:
        return self.seconds[DATA]

    @property
    def phases(self) -> Seconds | None:
        """All phases added up, and what a pipeline waits between them, without fetching; None where one was
        not timed."""
        if any(phase not in self.seconds for phase in PHASES):
            return None
        parts = [self.seconds[part] for part in (*PHASES, WAITING) if part in self.seconds]
        return sum(parts, np.zeros_like(self.steps))


PASSES = ("forward", "backward")
MESSAGE = "send"


def pipeline_use(record: Record) -> dict[str, Any]:
    """What one run of a pipeline does, and `by_rank` what each rank does of it.

    Bubbles are shares of the passes that ranks wait: by the schedule alone, and measured as `idle_share` has
    it. {} for a run that is no pipeline, or whose ranks measured nothing.
    """
    workload = of_record(record)
    if workload is None or record.world.mesh.size("pipeline") == 1 or not record.ranks:
        return {}
    if workload.strategy.family != "pipeline":
        return {}
    cut = pipeline.cut_of(workload)
    return {
        "schedule": pipeline.options_of(workload).schedule,
        "stages": cut.stages,
        "pipelines": record.world.world_size // cut.ranks,
        "micro_batches": pipeline.micro_batches_of(workload),
        "expected_bubble": pipeline.bubble_of(workload),
        "measured_bubble": _measured_bubble(record),
        "by_rank": [_stage_use(record, part, cut) for part in record.ranks],
    }


def _measured_bubble(record: Record) -> float | None:
    seconds = (found := Run.of(record).timings) and found.seconds
    if not seconds or any(phase not in seconds for phase in (*PASSES, WAITING)):
        return None
    computing = seconds[PASSES[0]] + seconds[PASSES[1]]
    places = [record.world.mesh.coordinates(part.rank) for part in record.ranks]
    pipelines = [tuple(at for name, at in place.items() if name != "pipeline") for place in places]
    return idle_share(computing, computing + seconds[WAITING], pipelines)


def idle_share(computing: Seconds, until_last: Seconds, pipelines: Sequence[Hashable]) -> float | None:
    """Share of a pipeline's passes in which its ranks run none, mean over ranks and median over steps.

    computing: seconds of a rank's own passes; until_last: seconds until the last of them ended; pipelines:
    which pipeline a rank belongs to. Ranks begin a step together, as the norm's all-reduce ended the one
    before. The passes last until the slowest rank's have ended: who ends sooner waits for it in the norm's
    all-reduce, which no seconds of waiting show.
    """
    spans = np.empty_like(until_last)
    for name in set(pipelines):
        own = [rank for rank, of in enumerate(pipelines) if of == name]
        spans[own] = until_last[own].max(axis=0)
    if not spans.all():
        return None
    return float(np.median(np.mean(1 - computing / spans, axis=0)))


def _stage_use(record: Record, part: RankPart, cut: Cut) -> dict[str, Any]:
    """Seconds are medians over the timed steps, None if not timed; it waits for other stages and messages
    until its own last pass. Bytes per probed step go to the next stages, or to those before."""
    stages = cut.of_rank(record.world.mesh.coordinates(part.rank)["pipeline"])
    held = {states.rank: states.measured_bytes for states in rank_states(record)}
    first, steps = first_timed(record), max(1, record.probed_steps)
    row: dict[str, Any] = {
        "rank": part.rank,
        "stages": ", ".join(map(str, stages)),
        "blocks": sum(len(cut.blocks_of(stage)) for stage in stages),
        "model_state_bytes": held.get(part.rank),
    }
    for phase in (*PASSES, WAITING):
        spent = part.phase_seconds.get(phase, [])[first:]
        row[f"{phase}_seconds"] = median(spent) if spent else None
    for phase, sent in zip(PASSES, ("activation_bytes", "gradient_bytes"), strict=True):
        messages = (r for r in record.comm if (r.rank, r.phase, r.op) == (part.rank, phase, MESSAGE))
        row[sent] = sum(r.payload_bytes for r in messages) / steps
    return row


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A record under its label; equal to itself only.

    Each figure is computed on first use and kept as long as the run, that is as long as its comparison: see
    the functions of this module.
    """

    record: Record
    label: str
    """The backend with its options, and in brackets what distinguishes it from others of its job and size."""
    session: int = 0
    """Which session of its comparison it ran on, counted from 0."""

    @classmethod
    def of(cls, record: Record) -> Run:
        """A run that is not compared with others, under the label of its backend."""
        return cls(record=record, label=record.backend.label)

    @property
    def backend(self) -> str:
        """The label without the brackets."""
        return self.record.backend.label

    @cached_property
    def cell(self) -> CellName:
        return CellName(self.label, self.record.world.world_size)

    @cached_property
    def series(self) -> tuple[Series, Series]:
        return series(self.record)

    @cached_property
    def step_seconds(self) -> list[float]:
        return [step.seconds for step in timed_steps(self.record)]

    @cached_property
    def mean_step_seconds(self) -> float | None:
        """Mean duration of a timed step: the clock of a run, which its rates follow."""
        return fmean(self.step_seconds) if self.step_seconds else None

    @cached_property
    def median_step_seconds(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None

    @cached_property
    def tokens_per_second(self) -> float | None:
        return rate(self.record, "tokens")

    @cached_property
    def samples_per_second(self) -> float | None:
        return rate(self.record, "samples")

    @cached_property
    def rank_peaks(self) -> list[int]:
        """Largest allocator peak of any step on each rank, in bytes; empty where no step was probed."""
        peaks = (run_peak(self.record, part) for part in self.record.ranks)
        return [peak for peak in peaks if peak is not None]

    @cached_property
    def steady_from(self) -> int | None:
        return steady_from(self.record)

    @cached_property
    def timings(self) -> Timings | None:
        record, ranks = self.record, self.record.ranks
        phases = [phase for phase in (*PHASES, WAITING) if all(phase in rank.phase_seconds for rank in ranks)]
        lists = {WHOLE: [rank.step_seconds for rank in ranks], DATA: [rank.data_seconds for rank in ranks]}
        lists |= {phase: [rank.phase_seconds[phase] for rank in ranks] for phase in phases}
        first = first_timed(record)
        # A rank that died left shorter lists than the others, or than there are steps.
        lengths = [len(of_rank) for of_ranks in lists.values() for of_rank in of_ranks]
        last = min(len(record.steps), *lengths) if ranks else 0
        if first >= last:
            return None
        seconds = np.array([[of_rank[first:last] for of_rank in of_ranks] for of_ranks in lists.values()])
        return Timings(
            seconds=dict(zip(lists, seconds, strict=True)),
            medians=dict(zip(lists, np.median(seconds, axis=2).tolist(), strict=True)),
        )

    @cached_property
    def disturbance(self) -> Disturbance | None:
        """What the ranks' accounts say; None where a rank has none, and on a CUDA stub: nothing is timed."""
        record = self.record
        if record.on_stub:
            return None
        accounts = [rank.processors for rank in record.ranks]
        known = [account for account in accounts if account is not None]
        if not known or len(known) < len(accounts):
            return None
        machines = grouped((account.boot, account) for account in known)  # whatever containers ranks run in
        taken = {}
        for boot, of_machine in machines.items():
            busy = [part.machine_busy_seconds + part.machine_stolen_seconds for part in of_machine]
            used = sum(busy) / len(busy)
            taken[boot] = max(0.0, used - sum(part.process_seconds for part in of_machine))
        # Ranks also wait for each other where they share cores: what others took alone is not the run's.
        lost = [min(_held_up_seconds(part), taken[part.boot]) for part in known]
        return Disturbance(
            seconds=max(part.seconds for part in known),
            other_cores=max(taken[part.boot] / part.seconds for part in known),
            lost_seconds=sum(
                min(sum(map(_held_up_seconds, parts)), taken[boot]) for boot, parts in machines.items()
            ),
            lost_by_rank=lost,
            lost_share=max(
                _lost_seconds(part, parts) / part.seconds / record.world.threads_per_rank
                for parts in machines.values()
                for part in parts
            ),
        )

    @property
    def own_step_seconds(self) -> float | None:
        """The mean timed step without what others took from CPU ranks; None where that was not recorded."""
        lost = self.disturbance.lost_share if self.disturbance and self.record.world.device == "cpu" else 1.0
        mean = self.mean_step_seconds
        return mean * (1 - lost) if mean is not None and lost < 1 else None

    def rank_medians(self, part: str) -> list[float]:
        """Per rank, the median timed step or a part of it; empty where that was not timed."""
        return [] if self.timings is None else self.timings.medians.get(part, [])

    def largest_median(self, part: str) -> float | None:
        """Seconds of a part on the rank where they are most (median); None where it was not timed."""
        return max(self.rank_medians(part), default=None)


@dataclass(frozen=True, kw_only=True)
class PeakRate:
    """What the devices of a run can do together."""

    flops_per_second: float
    source: str
    """A data sheet, or 'measured'."""


def p95_step_seconds(run: Run) -> float | None:
    return percentile_95(run.step_seconds) if run.step_seconds else None


def rank_spread_seconds(run: Run) -> float | None:
    """Slowest rank's median step minus the fastest's; None without timed steps."""
    medians = run.rank_medians(WHOLE)
    return max(medians) - min(medians) if medians else None


def median_step(parts: Sequence[OverlapPart]) -> OverlapPart:
    """Traced step of median duration, of two in the middle the shorter: a whole step adds up."""
    return sorted(parts, key=lambda part: part.seconds)[(len(parts) - 1) // 2]


def geometry(record: Record) -> ModelGeometry | None:
    """The record's model for the closed forms; None where it does not say, or is a mixture of experts."""
    shape = record.model.geometry if record.model else None
    if shape is None or record.layout is None:
        return None
    blocks = tuple(f"{name}." for name in record.layout.blocks)
    return ModelGeometry(
        multiplying_parameters=shape.multiplying_parameters,
        block_parameters=sum(
            math.prod(part.shape) for part in record.layout.parameters if part.name.startswith(blocks)
        )
        if blocks
        else 0,
        layers=shape.layers,
        attention_width=shape.attention_width,
        sequence_length=record.job.data.sequence_length,
    )


def model_flops_per_second(run: Run) -> float | None:
    """Model FLOPs of the tokens trained on, over the duration of the timed steps, all ranks together."""
    shape, tokens = geometry(run.record), run.tokens_per_second
    if shape is None or tokens is None:
        return None
    return (
        model_flops_per_token(shape) * tokens * (shape.sequence_length if counts_samples(run.record) else 1)
    )


def hardware_flops_per_second(run: Run) -> float | None:
    """FLOPs really computed, padding and recomputation included, all ranks together."""
    shape, samples = geometry(run.record), run.samples_per_second
    if shape is None or samples is None:
        return None
    each = hardware_flops_per_token(shape, recomputation=recomputation(run.record))
    return each * shape.sequence_length * samples


def recomputation(record: Record) -> bool | str:
    """What the backward pass computes once more: nothing where the model as built does not recompute."""
    built = record.model is not None and record.model.activation_checkpointing
    return (record.job.training.activation_checkpointing or True) if built else False


def least_flops_per_second(run: Run) -> float | None:
    """What the devices must have done at the least."""
    shape, samples = geometry(run.record), run.samples_per_second
    if shape is None or samples is None:
        return None
    return least_flops_per_token(shape) * shape.sequence_length * samples


def peak_dtype(record: Record) -> str | None:
    """Dtype of the matrix products: 'tf32' where fp32 was allowed to become it."""
    effective = record.backend.effective
    if effective is None:
        return None
    dtype = effective.autocast_dtype or effective.parameter_dtype
    seen = record.observed.tf32 if record.observed else None
    tf32 = record.job.training.tf32 if seen is None else seen
    return "tf32" if dtype == "float32" and tf32 and record.world.device == "cuda" else dtype


def sheet_rate(record: Record) -> PeakRate | None:
    """Peak of all ranks' devices by data sheet; None where one of them is not in the table."""
    dtype = peak_dtype(record)
    return _of_all([find_peak(rank.device_name, dtype) for rank in record.ranks] if dtype else [])


def measured_rate(record: Record) -> PeakRate | None:
    """Peak of all ranks as their matrix products reached it; None where it was not asked for."""
    dtype = peak_dtype(record) or ""
    rates = [rank.matmul_flops_per_second.get(dtype) for rank in record.ranks]
    return _of_all([None if rate is None else (rate, "measured") for rate in rates])


def _of_all(ranks: Sequence[tuple[float, str] | None]) -> PeakRate | None:
    known = [peak for peak in ranks if peak is not None]
    if not known or len(known) < len(ranks):
        return None
    sources = dict.fromkeys(source for _, source in known)
    return PeakRate(flops_per_second=sum(rate for rate, _ in known), source="; ".join(sources))


def share_of(flops_per_second: float | None, peak: PeakRate | None) -> float | None:
    """Utilisation: a rate over a peak; None if either is unknown."""
    if flops_per_second is None or peak is None:
        return None
    return flops_per_second / peak.flops_per_second
