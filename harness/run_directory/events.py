"""What a rank writes and a launcher reads: one JSON object per line. Floats that are not finite are null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter

from harness.backends.base import Effective
from harness.backends.strategy import StrategyKind
from harness.forms.terms import OwnForms
from harness.record import (
    AcceleratorPart,
    AnswerPart,
    CheckpointPart,
    CommunicationPart,
    DataPart,
    EnergyPart,
    LayoutPart,
    MemoryPart,
    ModelPart,
    ObservationPart,
    ObservedPart,
    OverlapPart,
    Part,
    ProcessorPart,
    SetupMemoryPart,
    WeightsPart,
    Window,
)
from harness.record.run import with_details

Sketches = Mapping[str, Sequence[float | None]]
"""Of each parameter: see `worker/sketch.py`."""


Duration = Annotated[float, AfterValidator(lambda seconds: round(seconds, 9))]
"""Seconds to the nanosecond, as far as the clock goes: more digits would be those of a binary fraction."""


class UnsupportedEvent(Part):
    """The backend cannot run here."""

    kind: Literal["unsupported"] = "unsupported"
    reasons: list[str]


class FailureEvent(Part):
    """An exception ended the rank."""

    kind: Literal["failure"] = "failure"
    status: Literal["oom", "failed"]
    error_kind: str
    message: str
    at: float
    """Seconds since the epoch."""
    step: int | None = None
    phase: str | None = None


class SetupEvent(Part):
    """The rank is ready to train."""

    kind: Literal["setup"] = "setup"
    effective: Annotated[Effective, BeforeValidator(with_details)]
    native_config: dict[str, Any]
    versions: dict[str, str]
    initial_weights: WeightsPart | None
    collectives: str
    claim: StrategyKind | None = None
    own_forms: OwnForms | None = None
    """Of rank 0 only."""
    host: str
    device_name: str
    accelerator: AcceleratorPart | None = None
    layout: LayoutPart | None = None
    """None: the backend did not build the model."""
    model: ModelPart | None = None
    data: DataPart | None
    """None: not known of an observed script."""
    steps: int | None
    """Of the whole training; None: not known of an observed script."""
    host_memory: SetupMemoryPart | None = None
    matmul_flops_per_second: dict[str, float] = {}
    setup_seconds: float


class AppliedGradients(Part):
    """Gradients that the optimizer was given on this rank, after clipping."""

    squares: float | None
    """Sum over all of their elements; None: not finite."""
    share: float
    """Elements over those of all parameters that train."""


class StepEvent(Part):
    """One optimizer step: see `StepPart` and `RankPart` for what they share."""

    kind: Literal["step"] = "step"
    step: int
    window: Window
    loss_sum: float | None
    gradient_norm: float | None
    norm_is_partial: bool = False
    """Whether the norm is that of this rank's part of the gradient."""
    learning_rate: float
    applied_learning_rate: float | None = None
    group_learning_rates: list[float | None] | None = None
    """Of an observed script: of each group of its optimizers, None where it has none or did not step."""
    applied: AppliedGradients | None = None
    global_target_tokens: int | None
    """None: an observed script, whose `loss_weight` counts."""
    loss_weight: float | None = None
    """What the loss sums of all ranks are divided by, added up over them: this rank's part."""
    samples: int | None
    tokens: int | None
    target_tokens: int | None
    sample_hashes: str | None
    seconds: Duration
    data_seconds: Duration
    phase_seconds: dict[str, Duration]
    batch_digests: list[str] | None = None
    """None: not one of the first steps."""
    batch_hash_sum: str | None = None
    computed_loss_sum: float | None = None


class ObservationEvent(Part):
    """What was seen of a training script; the last one counts."""

    kind: Literal["observation"] = "observation"
    observation: ObservationPart
    seen: dict[str, Any]
    """Settings of a job by their names, such as 'training.precision', as far as they were seen."""
    world_size: int
    ranks_per_node: int
    device: str
    threads: int
    micro_batch_size: int | None
    accumulation_steps: int


class EvaluationEvent(Part):
    """One evaluation."""

    kind: Literal["evaluation"] = "evaluation"
    step: int
    loss_sum: float | None
    target_tokens: int
    samples: int
    """Over all ranks."""
    seconds: float


class CheckpointEvent(Part):
    """A checkpoint was saved or loaded."""

    kind: Literal["checkpoint"] = "checkpoint"
    part: CheckpointPart


class ExaminedEvent(Part):
    """Gradients and updates of one step by parameter, as sketches; for a diagnosis."""

    kind: Literal["examined"] = "examined"
    step: int
    gradients: Sketches | None
    """None: the engine cannot gather them."""
    updates: Sketches
    weight_norms: Mapping[str, float | None]


class MeasuredEvent(Part):
    """Everything that was probed."""

    kind: Literal["measured"] = "measured"
    memory: list[MemoryPart]
    communication: list[CommunicationPart]
    early_reduced_bytes: int | None
    overlap: list[OverlapPart]
    overlap_missing: str | None = None
    probe_seconds: dict[str, float]
    timed_probes: list[str]
    reserved_bytes: int | None
    num_alloc_retries: int | None = None
    host_peak_bytes: int | None
    processors: ProcessorPart | None = None
    energy: EnergyPart | None = None


class RankAnswers(Part):
    """Answers of one rank to its share of the held-out questions."""

    given: list[AnswerPart]
    seconds: float


class FinalEvent(Part):
    """The state after the training."""

    kind: Literal["final"] = "final"
    weights: WeightsPart | None
    observed: ObservedPart
    probe_loss: float | None
    answers: RankAnswers | None = None


class StoppedEvent(Part):
    """The rank was asked to terminate."""

    kind: Literal["stopped"] = "stopped"
    at: float


class DoneEvent(Part):
    """The rank finished."""

    kind: Literal["done"] = "done"


Event = (
    UnsupportedEvent
    | FailureEvent
    | SetupEvent
    | StepEvent
    | ObservationEvent
    | EvaluationEvent
    | CheckpointEvent
    | ExaminedEvent
    | MeasuredEvent
    | FinalEvent
    | StoppedEvent
    | DoneEvent
)
ENDINGS = (DoneEvent, FailureEvent, UnsupportedEvent, StoppedEvent)
"""What a rank says last."""

_READER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def read_event(line: bytes) -> Event:
    """The event of one line. Raises ValidationError."""
    return _READER.validate_json(line)
