"""A run as a table of facts, and its figures: each has one entry with its key, unit, aggregation and places.

`compare --json`, the tables, CSV, `--fail-on`, the report before and after and the tracking export follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import median
from typing import Any, Literal

from harness.judge import quantities
from harness.judge.agreement.parity import Judgement
from harness.judge.quantities import Run, expected_model_state_bytes, expected_sent_bytes_per_step
from harness.record import Record

Unit = Literal["tokens/s", "samples/s", "seconds", "bytes", "loss", "nats/token", "relative", "step"]
Place = Literal["results", "data", "changes", "tracking", "volume", "parity"]
"""'results': a column of the main table; 'data': of its CSV and JSON only; 'changes': compared before and
after, and allowed in --fail-on; 'tracking': exported to experiment trackers; 'volume': columns of the section
on communication; 'parity': values of the finding that a run diverged."""
SPEED = "tokens_per_second"
"""Key of the metric that backends are compared by."""
STEP = "step_seconds"
"""Key of the mean timed step, from which the rates follow."""
OWN_STEP = "own_step_seconds"
"""Key of the same without what other programs and a hypervisor took from the ranks."""
SENT = "sent_bytes_per_step"
EXPECTED_SENT = "expected_sent_bytes_per_step"
TEXTBOOK_SENT = "textbook_sent_bytes_per_step"
TRANSPORT_SENT = "transport_sent_bytes_per_step"
RATES = ("tokens/s", "samples/s")
Read = Callable[[Run, Judgement], float | None]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure of a run."""

    key: str
    """Its name for programs, with the unit."""
    title: str
    """Heading of a column."""
    unit: Unit
    read: Read
    """The value of one run; None if it was not measured."""
    meaning: str = ""
    """For `harness explain KEY` and the page of columns."""
    name: str = ""
    """Label of an axis, without the unit."""
    pool: Callable[[Run], Sequence[float]] | None = None
    """The values behind the figure, aggregated over all repeats together; None: the figure of each run."""
    aggregate: Callable[[Sequence[float]], float] = median
    """The figure of a cell of the values of its repeats."""
    better: Literal["higher", "lower"] | None = "lower"
    is_count: bool = False
    """A count, not a timing: any difference is one, however few the runs."""
    limit: str | None = None
    """In what the limits of parity bound its rounding: a smaller change is none, however few the runs."""
    follows: str | None = None
    """Key of a metric that changes in the same way; a verdict names that one only."""
    shown: tuple[Place, ...] = ("data", "changes", "tracking")

    @property
    def is_timed(self) -> bool:
        return self.unit in (*RATES, "seconds")

    def clock(self, values: Sequence[float]) -> list[float]:
        """The values as they are compared: of rates the seconds per unit, so that one clock ranks all."""
        return [_inverse(value) for value in values] if self.unit in RATES else list(values)

    def middle(self, values: Sequence[float]) -> float:
        """The median by that clock: of an even number of rates not the mean of the two in the middle."""
        return rate_median(values) if self.unit in RATES else median(values)


def rate_median(rates: Sequence[float]) -> float:
    return _inverse(median(map(_inverse, rates)))


def _inverse(value: float) -> float:
    return 1 / value if value else inf


def _of_record(read: Callable[[Record], float | None]) -> Read:
    return lambda run, _: read(run.record)


def of_ranks(name: str, over: Callable[[Sequence[float]], float] = max) -> Read:
    """A figure that a probe wrote on each rank, over the ranks; None where no rank has it."""

    def read(run: Run, _: Judgement) -> float | None:
        values = [value for part in run.record.ranks if (value := part.figures.get(name)) is not None]
        return over(values) if values else None

    return read


def _largest(pool: Callable[[Run], Sequence[float]]) -> Read:
    return lambda run, _: max(pool(run), default=None)


METRICS = (
    Metric(
        key=SPEED, title="tokens/s", unit="tokens/s",
        meaning="tokens of timed steps over their seconds, of all ranks together",
        better="higher", name="throughput",
        read=lambda run, _: run.tokens_per_second, aggregate=rate_median,
        shown=("results", "changes", "tracking"),
    ),
    Metric(
        key="samples_per_second", title="samples/s", unit="samples/s",
        meaning="samples of timed steps over their seconds, of all ranks together", better="higher",
        follows=SPEED, read=lambda run, _: run.samples_per_second, aggregate=rate_median,
        shown=("changes", "tracking"),
    ),
    Metric(
        key="evaluation_samples_per_second", title="held-out samples/s", unit="samples/s",
        meaning="samples of an evaluation over its seconds, median of the timed ones", better="higher",
        read=_of_record(quantities.evaluation_rate), aggregate=rate_median, shown=("tracking",),
    ),
    Metric(
        key=STEP, title="step ms", unit="seconds",
        meaning="mean timed step, each as long as that of its slowest rank",
        follows=SPEED, read=lambda run, _: run.mean_step_seconds,
        shown=("results", "changes", "tracking"),
    ),
    Metric(
        key=OWN_STEP, title="step ms without others", unit="seconds",
        meaning="mean timed step without what other programs took from the processors", follows=SPEED,
        read=lambda run, _: run.own_step_seconds, shown=("data",),
    ),
    Metric(
        key="peak_bytes", title="peak MB/rank", unit="bytes",
        meaning="most memory that the allocator served on a rank in any step", name="peak memory of a rank",
        read=_largest(lambda run: run.rank_peaks), pool=lambda run: run.rank_peaks, aggregate=max,
        shown=("results", "changes", "tracking"),
    ),
    Metric(
        key="model_state_bytes", title="states MB", unit="bytes",
        meaning="weights, gradients and optimizer states after the backward pass, largest rank",
        is_count=True,
        read=_of_record(quantities.model_state_bytes), shown=("results", "changes", "tracking"),
    ),
    Metric(
        key="expected_model_state_bytes", title="expected states MB", unit="bytes",
        meaning="weights, gradients and optimizer states by the closed form, largest rank", better=None,
        read=_of_record(expected_model_state_bytes), shown=(),
    ),
    Metric(
        key=SENT, title="sent MB/step", unit="bytes",
        meaning="counted collectives of a step, sent on a ring, mean of the ranks", is_count=True,
        name="sent by a rank per step", read=_of_record(quantities.sent_bytes_per_step),
        shown=("results", "changes", "tracking", "volume"),
    ),
    Metric(
        key=EXPECTED_SENT, title="expected MB/step", unit="bytes",
        meaning="bytes sent per step by the library's closed form", better=None,
        read=_of_record(expected_sent_bytes_per_step), shown=("results", "volume"),
    ),
    Metric(
        key=TEXTBOOK_SENT, title="textbook MB/step", unit="bytes",
        meaning="bytes sent per step as the papers count them", better=None,
        read=_of_record(quantities.textbook_bytes_per_step), shown=("results", "volume"),
    ),
    Metric(
        key=TRANSPORT_SENT, title="on the transport MB/step", unit="bytes",
        meaning="bytes sent per step as the transport does it: gloo replaces some collectives by others",
        read=_of_record(quantities.transport_bytes_per_step), shown=("volume",),
    ),
    Metric(
        key="final_loss", title="final loss", unit="loss", meaning="loss of the last step", better=None,
        limit="loss", read=lambda run, _: run.record.last_loss,
        shown=("changes",),
    ),
    Metric(
        key="max_loss_difference", title="loss diff", unit="nats/token",
        meaning="largest difference of a step's loss to the reference's", aggregate=max,
        read=lambda _, judgement: judgement.loss_difference,
        shown=("results", "changes", "tracking", "parity"),
    ),
    Metric(
        key="max_grad_norm_difference", title="norm diff", unit="relative",
        meaning="largest difference of a step's gradient norm, over the reference's", aggregate=max,
        read=lambda _, judgement: judgement.norm_difference,
        shown=("results", "changes", "tracking", "parity"),
    ),
    Metric(
        key="final_weights_difference", title="final weights", unit="relative",
        meaning="distance of the final weights, over how far the reference moved", aggregate=max,
        read=lambda _, judgement: judgement.weights_difference, shown=("parity",),
    ),
    Metric(
        key="update_difference", title="distance moved", unit="relative",
        meaning="difference of how far the weights moved, over the reference's", aggregate=max,
        read=lambda _, judgement: judgement.update_difference, shown=("parity",),
    ),
    Metric(
        key="first_divergent_step", title="first step beyond", unit="step",
        meaning="first step whose loss or norm lies beyond the limit", better="higher",
        read=lambda _, judgement: judgement.first_divergent_step, aggregate=min, shown=("parity",),
    ),
    Metric(
        key="predicted_peak_bytes", title="predicted peak MB/rank", unit="bytes",
        meaning="`peak_bytes` as predicted before the run", better=None, aggregate=max,
        read=_of_record(quantities.predicted_peak_bytes), shown=(),
    ),
    Metric(
        key="reserved_bytes", title="reserved MB/rank", unit="bytes",
        meaning="most memory that torch's allocator took from the GPU, largest rank", aggregate=max,
        read=_largest(lambda run: [r.reserved_bytes for r in run.record.ranks if r.reserved_bytes]),
    ),
    Metric(
        key="host_peak_bytes", title="host peak MB/rank", unit="bytes",
        meaning="most RAM of a process, libraries included, largest rank", aggregate=max,
        read=_of_record(quantities.host_peak_bytes),
    ),
)  # fmt: skip
BY_KEY = {metric.key: metric for metric in METRICS}


def metrics_in(*places: Place) -> list[Metric]:
    """The metrics that are shown in any of these places, in their order."""
    return [metric for metric in METRICS if not set(places).isdisjoint(metric.shown)]


Source = Literal["measured", "expected", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One value of one run."""

    quantity: str
    """Name of the field, with its unit."""
    value: float | str | None
    """In the unit that the quantity names; None: not known."""
    unknown: str | None = None
    """Why there is no value."""
    source: Source = "measured"
    """'expected': by the closed forms; 'predicted': before the run."""
    rank: int | None = None
    """None: over all ranks."""
    step: int | None = None
    """None: over all steps."""
    subject: str = ""
    """A kind or moment of memory, a phase, a collective; empty: the quantity says all."""


def facts(record: Record) -> Iterator[Fact]:
    """Every value of a run: of the run, of ranks and steps, of kinds of memory and of collectives."""
    if record.prediction is not None:
        yield Fact(quantity="peak_bytes", value=record.prediction.peak_bytes, source="predicted")
    for step in record.steps:
        for name, value in asdict(step).items():
            if name != "step":
                yield Fact(quantity=name, value=value, step=step.step)
    for part in record.ranks:
        for name in type(part).model_fields:
            yield from _of_field(record, part.rank, name, getattr(part, name))
        for moment in part.memory:
            for name, value in moment:
                if name not in ("step", "moment"):
                    subject = moment.moment
                    yield from _values(name, value, rank=part.rank, step=moment.step, subject=subject)
    for held in quantities.rank_states(record):
        kinds = held.expected.kinds() if held.expected is not None else {}
        for kind, size in kinds.items():
            yield Fact(
                quantity="kinds", value=size, source="expected", rank=held.rank, step=held.step,
                subject=f"after_backward {kind}",
            )  # fmt: skip
    yield from _collectives(record)


def _of_field(record: Record, rank: int, name: str, value: Any) -> Iterator[Fact]:
    """A field of a rank: one value, one per step, or those of named parts."""
    numbers = [step.step for step in record.steps]
    if isinstance(value, list):
        if all(isinstance(one, float | int | str | None) for one in value):
            for step, one in zip(numbers, value, strict=False):
                yield Fact(quantity=name, value=one, rank=rank, step=step)
    elif isinstance(value, dict) and all(isinstance(one, list) for one in value.values()):
        for subject, series in value.items():
            yield from (
                Fact(quantity=name, value=one, rank=rank, step=step, subject=str(subject))
                for step, one in zip(numbers, series, strict=False)
                if isinstance(one, float | int | str | None)
            )
    elif name != "rank":
        yield from _values(name, value, rank=rank)


def _values(name: str, value: Any, *, subject: str = "", **where: Any) -> Iterator[Fact]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _values(name, one, subject=f"{subject} {key}".strip(), **where)
    elif isinstance(value, float | int | str | None):
        yield Fact(quantity=name, value=value, subject=subject, **where)


def _collectives(record: Record) -> Iterator[Fact]:
    """Payload of each kind of collective, next to what is expected; calls of the job's own are left out."""
    pair = quantities.volume_of(record)
    if pair is None:
        for row in record.comm:
            subject = f"{row.phase} {row.op} {row.dtype} {row.role}"
            yield Fact(quantity="payload_bytes", value=row.payload_bytes, rank=row.rank, subject=subject)
        return
    workload, volume = pair
    for rank, sums in quantities.measured_payload(record, workload).items():
        for key, size in sums.items():
            yield Fact(quantity="payload_bytes", value=size, rank=rank, subject=" ".join(key))
    for key, size in quantities.expected_payload(volume, workload.mesh).items():
        unknown = quantities.why_unknown(record)
        yield Fact(
            quantity="payload_bytes", value=None if unknown else size, unknown=unknown, source="expected",
            subject=" ".join(key),
        )  # fmt: skip
