"""A configuration file: a job, how it is measured, where it runs and what is compared."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic

from harness.backends.model_source import AskedLoading
from harness.backends.registry import IN_DEFAULT_COMPARISON
from harness.bounds import MOST_REPEATS
from harness.files import Stored
from harness.job.job import Job, SettingsSection


class Limits(SettingsSection):
    """Times after which a run is ended and recorded as timeout, with where each rank was."""

    timeout_seconds: pydantic.PositiveFloat | None = None
    stuck_after_steps: pydantic.PositiveFloat = 10.0
    stuck_after_seconds: pydantic.PositiveFloat = 30.0
    phase_timeout_seconds: pydantic.PositiveFloat = 570.0
    idle_timeout_seconds: pydantic.PositiveFloat = 60.0

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

    amount: pydantic.FiniteFloat = pydantic.Field(gt=0)
    """Of one hour of one GPU."""
    currency: str = pydantic.Field(pattern="^[A-Z]{3}$")
    """ISO 4217."""

    def __str__(self) -> str:
        return f"{self.amount:g} {self.currency}"


def read_price(value: Any) -> Any:
    """The price that a text such as '2.5 USD' means. Raises ValueError."""
    if not isinstance(value, str | int | float):
        return value
    found = _TEXT.fullmatch(str(value).strip())
    if found is None:
        raise ValueError("give an amount and a currency of three letters, such as '2.5 USD'")
    return {"amount": float(found[1]), "currency": found[2]}


GivenPrice = Annotated[
    Price,
    pydantic.BeforeValidator(read_price),
    pydantic.WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
"""A setting in money per hour of one GPU."""


def read_turns(value: Any) -> Any:
    """A number of steps, 'auto' or None. Raises ValueError."""
    if value in ("auto", None) or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("give the steps of a turn, auto: the harness decides, or null: each cell runs whole")


_SIZE = pydantic.TypeAdapter(pydantic.ByteSize)


def read_bytes(value: Any) -> int:
    """The bytes that a number or a text such as '2GB' (10^9) or '2GiB' (2^30) means. Raises ValueError."""
    try:
        size = int(_SIZE.validate_python(value))
    except pydantic.ValidationError:
        size = 0
    if size < 1:
        raise ValueError("give bytes, or a size such as 2GB (10^9 bytes each) or 2GiB (2^30)")
    return size


Bytes = Annotated[
    int,
    pydantic.BeforeValidator(read_bytes),
    pydantic.WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]
"""A setting in bytes."""


LEAST_TIMED_STEPS = 8
"""A shorter run, unless of a script, times every step that carries no probe, and has no cooldown."""


CheckpointFormat = Literal["none", "native", "consolidated", "neutral"]
ReportFocus = Literal["speed", "memory", "footprint", "parity", "scaling", "all"]
"""What a comparison is made to answer; its report answers nothing else."""


def speeds_are_asked(question: ReportFocus) -> bool:
    """Whether a report that answers this question may print a figure of speed."""
    return question in ("all", "speed", "scaling")


class MeasureSection(SettingsSection):
    """Which steps of a run are measured how."""

    warmup_steps: pydantic.NonNegativeInt = 3
    probed_steps: pydantic.NonNegativeInt = 2
    traced_steps: pydantic.NonNegativeInt = 1
    cooldown_steps: pydantic.NonNegativeInt = 3
    trace: bool = False
    matmul_peak: bool = False
    memory_snapshot: bool = False
    checkpoint: CheckpointFormat = "none"
    keep_checkpoint: bool = False
    timed: bool = True
    weight_digests: bool = True

    @pydantic.field_validator("checkpoint", mode="before")
    @classmethod
    def _format_of_truth(cls, value: Any) -> Any:
        return {True: "native", False: "none"}[value] if isinstance(value, bool) else value

    @pydantic.model_validator(mode="after")
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

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: pydantic.PositiveInt | None = pydantic.Field(None, le=1024)
    memory_limit: Bytes | None = None
    preset: Literal["like-for-like", "library-defaults"] = "like-for-like"
    loading: AskedLoading = "slices"


class CompareSection(SettingsSection):
    """The matrix that `compare` runs."""

    question: ReportFocus = "all"
    backends: list[str] = pydantic.Field(list(IN_DEFAULT_COMPARISON), min_length=1)
    world_sizes: list[pydantic.PositiveInt] = pydantic.Field([2], min_length=1)
    repeats: pydantic.PositiveInt = pydantic.Field(1, le=MOST_REPEATS)
    turns: Annotated[pydantic.PositiveInt | Literal["auto"] | None, pydantic.BeforeValidator(read_turns)] = (
        "auto"
    )
    price_per_gpu_hour: GivenPrice | None = None
    noise_runs: bool = True


INHERITS = "inherits"
"""Key of a file that names the files whose values it takes over; it is resolved as files are read."""


class Experiment(Job):
    """A configuration file: the job, and how to run and measure it."""

    measure: MeasureSection = MeasureSection()
    runtime: RuntimeSection = RuntimeSection()
    compare: CompareSection = CompareSection()

    @pydantic.model_validator(mode="after")
    def _limit_takes_effect(self) -> Experiment:
        if self.runtime.memory_limit and not self.measure.probed_steps and self.runtime.device != "cuda":
            raise ValueError("`runtime.memory_limit` needs `measure.probed_steps` of at least 1 on the CPU")
        return self

    @pydantic.model_validator(mode="after")
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
