"""A configuration file: a job, how it is measured, where it runs and what is compared."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from harness.backends.model_source import Loading
from harness.backends.registry import IN_DEFAULT_COMPARISON
from harness.bounds import MOST_REPEATS
from harness.files import Stored
from harness.job.job import Job, SettingsSection


class Limits(SettingsSection):
    """Times after which a run is ended and recorded as timeout, with where each rank was."""

    timeout_seconds: PositiveFloat | None = Field(
        None,
        description="seconds after which a run is stopped and recorded as timeout; default: 1800 plus three "
        "times what its steps need at their measured pace, known from the second step on",
    )
    stuck_after_steps: PositiveFloat = Field(
        10.0,
        description="a run ends when no rank moves for this many median steps plus `stuck_after_seconds`",
    )
    stuck_after_seconds: PositiveFloat = Field(
        30.0, description="seconds added to `stuck_after_steps`; the record then shows where each rank was"
    )
    phase_timeout_seconds: PositiveFloat = Field(
        570.0,
        description="outside of training steps and evaluations (start, checkpoint, torch.compile) a run ends "
        "when no rank moves for this many seconds",
    )
    start_timeout_seconds: PositiveFloat = Field(
        60.0,
        description="a run ends when a rank stays this many seconds in a phase of the start that "
        "others have left, and for three times as long as they needed",
    )
    idle_timeout_seconds: PositiveFloat = Field(
        60.0,
        description="outside of training steps and evaluations a run ends when for this many seconds no "
        "rank made progress, computed, read or wrote (where all ranks are on one machine)",
    )

    @classmethod
    def of(cls, runtime: Limits) -> Limits:
        """These settings alone, of a section that has more."""
        return cls.model_validate(runtime.model_dump(include=set(cls.model_fields)))

    @property
    def collective_seconds(self) -> float:
        """After these a collective gives up by itself, later than who watches the ranks, and says less."""
        return max(600.0, self.phase_timeout_seconds + 30.0)


_TEXT = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([A-Z]{3})")


class Price(Stored):
    """An amount of money."""

    amount: FiniteFloat = Field(gt=0)
    """Of one hour of one GPU."""
    currency: str = Field(pattern="^[A-Z]{3}$")
    """ISO 4217."""

    def __str__(self) -> str:
        return f"{self.amount:g} {self.currency}"


def read_price(value: Any) -> Any:
    """The price that a text such as '2.5 USD' means. Raises ValueError."""
    if not isinstance(value, str):
        return value
    found = _TEXT.fullmatch(value.strip())
    if found is None:
        raise ValueError("give an amount and a currency of three letters, such as '2.5 USD'")
    return {"amount": float(found[1]), "currency": found[2]}


GivenPrice = Annotated[
    Price,
    BeforeValidator(read_price),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
"""A setting in money per hour of one GPU."""


def read_turns(value: Any) -> Any:
    """A number of steps, 'auto' or None. Raises ValueError."""
    if value in ("auto", None) or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("give the steps of a turn, auto: the harness decides, or null: each cell runs whole")


_SIZE = TypeAdapter(ByteSize)


def read_bytes(value: Any) -> int:
    """The bytes that a number or a text such as '2GB' (10^9) or '2GiB' (2^30) means. Raises ValueError."""
    try:
        size = int(_SIZE.validate_python(value))
    except ValidationError:
        size = 0
    if size < 1:
        raise ValueError("give bytes, or a size such as 2GB (10^9 bytes each) or 2GiB (2^30)")
    return size


Bytes = Annotated[
    int,
    BeforeValidator(read_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]
"""A setting in bytes."""


LEAST_TIMED_STEPS = 8
"""A shorter run times every step that carries no probe, and has no cooldown."""


CheckpointFormat = Literal["none", "native", "consolidated", "neutral"]
ReportFocus = Literal["speed", "memory", "footprint", "parity", "scaling", "all"]
"""What a comparison is made to answer; its report answers nothing else."""


def speeds_are_asked(question: ReportFocus) -> bool:
    """Whether a report that answers this question may print a figure of speed."""
    return question in ("all", "speed", "scaling")


class MeasureSection(SettingsSection):
    """Which steps of a run are measured how."""

    warmup_steps: NonNegativeInt = Field(3, description="first steps, excluded from all statistics")
    probed_steps: NonNegativeInt = Field(
        2,
        description="steps after the warm-up whose memory and communication are recorded, not timed",
    )
    traced_steps: NonNegativeInt = Field(
        1,
        description="further steps, which torch's profiler records, not timed: how far communication "
        "overlaps; on CUDA an extra step before them is discarded",
    )
    cooldown_steps: NonNegativeInt = Field(
        3,
        description="steps after the probed and traced ones, excluded as well, until the side effects "
        "of the probes have faded; none in a run that would then time fewer than 8",
    )
    trace: bool = Field(
        False, description="keep the profiler's trace of each rank, for Perfetto or chrome://tracing"
    )
    matmul_peak: bool = Field(
        False,
        description="before the training, measure on each rank what matrix products alone reach",
    )
    memory_snapshot: bool = Field(
        False,
        description="CUDA: write every allocation of the probed steps, with its stack, to a file per rank",
    )
    checkpoint: CheckpointFormat = Field(
        "none",
        description="save a checkpoint after the probed steps and load it again, with time, memory and "
        "collectives recorded; its files are deleted again. native (or true): in the library's own format; "
        "consolidated: the weights as Hugging Face reads them; neutral: weights and optimizer states by "
        "name, from which other backends resume; none (or false): no checkpoint",
    )
    keep_checkpoint: bool = Field(
        False, description="leave that checkpoint in the run's folder, as `checkpoint`"
    )
    timed: bool = Field(
        True, description="time the remaining steps; false: only losses and weights are wanted"
    )
    weight_digests: bool = Field(
        True, description="gather and digest all weights before the first and after the last step"
    )

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _format_of_truth(cls, value: Any) -> Any:
        return {True: "native", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _settings_take_effect(self) -> MeasureSection:
        if self.trace and not self.traced_steps:
            raise ValueError("`trace` needs `traced_steps` of at least 1")
        if self.saves_checkpoint and not self.probed_steps:
            raise ValueError("`checkpoint` needs `probed_steps` of at least 1: it is saved after them")
        if self.keep_checkpoint and not self.saves_checkpoint:
            raise ValueError("`keep_checkpoint` needs `checkpoint` to be native, consolidated or neutral")
        return self

    @property
    def saves_checkpoint(self) -> bool:
        """Whether a checkpoint is saved after the probed steps."""
        return self.checkpoint != "none"

    def losses_alone(self) -> MeasureSection:
        """These settings for a run that nothing looks at but its losses, norms and weights."""
        return MeasureSection(probed_steps=0, traced_steps=0, timed=False, weight_digests=self.weight_digests)

    def window(
        self, step: int, steps: int, *, discarded: int = 0
    ) -> Literal["warmup", "probed", "traced", "cooldown", "timed"]:
        """Which window a step of a run of `steps` belongs to; they follow each other in this order.

        `discarded`: steps that are traced in addition, only to start the profiler.
        """
        watched = self.probed_steps + self.traced_steps + (discarded if self.traced_steps else 0)
        left = steps - self.warmup_steps - watched
        cooldown = self.cooldown_steps if watched and left - self.cooldown_steps >= LEAST_TIMED_STEPS else 0
        if step < self.warmup_steps or not self.timed:
            return "warmup"
        if step < self.warmup_steps + self.probed_steps:
            return "probed"
        if step < self.warmup_steps + watched:
            return "traced"
        return "cooldown" if step < self.warmup_steps + watched + cooldown else "timed"


class RuntimeSection(Limits):
    """The machine's side of a run."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    threads_per_rank: PositiveInt | None = Field(
        None, le=1024, description="CPU threads per rank; default: cores divided by the ranks of the node"
    )
    memory_limit: Bytes | None = Field(
        None,
        description="memory of each rank's device, such as 40GB, context and NCCL's buffers included; above "
        "it the run is out of memory. On the CPU what torch's allocator may serve, from the first to the "
        "last probed step",
    )
    preset: Literal["like-for-like", "library-defaults"] = Field(
        "like-for-like",
        description="like-for-like: settings that make strategies textbook-comparable",
    )
    loading: Loading = Field(
        "slices",
        description="how initial weights reach ranks that shard them: each draws or reads them and keeps "
        "its part (slices), rank 0 broadcasts them, or every rank builds the whole model first (full)",
    )


class CompareSection(SettingsSection):
    """The matrix that `compare` runs."""

    question: ReportFocus = Field(
        "all",
        description="what the report answers: speed, memory, footprint (memory and traffic of a rank), "
        "parity, scaling, or all; it states no figures of speed unless they were asked for",
    )
    backends: list[str] = Field(
        list(IN_DEFAULT_COMPARISON),
        min_length=1,
        description="backends, with options after a colon; [all] for every registered one",
    )
    world_sizes: list[PositiveInt] = Field([2], min_length=1, description="numbers of ranks")
    repeats: PositiveInt = Field(1, le=MOST_REPEATS, description="runs of each cell")
    turns: Annotated[PositiveInt | Literal["auto"] | None, BeforeValidator(read_turns)] = Field(
        "auto",
        description="on the CPU: cells of one round are set up and probed one after the other, "
        "wait asleep, and take turns of so many timed steps in random order; auto: of one, where rounds "
        "enough for an order are asked and all fit into memory at once; null: each cell runs whole",
    )
    price_per_gpu_hour: GivenPrice | None = Field(
        None,
        description="what an hour of one GPU costs, such as '2.5 USD': the report then states GPU-hours and "
        "cost per 1e9 tokens of runs on GPUs; null: no cost",
    )
    noise_runs: bool = Field(
        True,
        description="repeat the reference with another split of the batch, and at low precision in fp32: "
        "their spread decides what counts as rounding",
    )


INHERITS = "inherits"
"""Key of a file that names the files whose values it takes over; it is resolved as files are read."""


class Experiment(Job):
    """A configuration file: the job, and how to run and measure it."""

    measure: MeasureSection = MeasureSection()
    runtime: RuntimeSection = RuntimeSection()
    compare: CompareSection = CompareSection()

    @model_validator(mode="after")
    def _limit_takes_effect(self) -> Experiment:
        if self.runtime.memory_limit and not self.measure.probed_steps and self.runtime.device != "cuda":
            raise ValueError("`runtime.memory_limit` needs `measure.probed_steps` of at least 1 on the CPU")
        return self

    @model_validator(mode="after")
    def _checkpoint_is_reached(self) -> Experiment:
        measure, steps = self.measure, self.training.steps
        if not measure.saves_checkpoint:
            return self
        if self.optimizer.kind != "adamw":
            raise ValueError(
                f"`measure.checkpoint` saves moments of `optimizer.kind: adamw`, not of {self.optimizer.kind}"
            )
        if not measure.timed:
            raise ValueError(
                "`measure.checkpoint` is saved after probed steps: it needs `measure.timed: true`"
            )
        least = measure.warmup_steps + measure.probed_steps
        if steps is not None and steps < least:
            raise ValueError(
                f"`measure.checkpoint` is saved after {least} steps (`measure.warmup_steps` and "
                f"`probed_steps`), `training.steps` is {steps}"
            )
        return self

    def job(self) -> Job:
        return Job(**{name: getattr(self, name) for name in Job.model_fields})
