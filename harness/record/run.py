"""One run, self-contained, and the backend that it ran under."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from harness.backends.base import Effective
from harness.backends.strategy import StrategyKind
from harness.command_lines import KeptCommand
from harness.forms.flops import is_stub
from harness.forms.terms import OwnForms
from harness.record.answers import AnswersPart
from harness.record.checkpoint import ResumedPart
from harness.record.communication import CommunicationPart
from harness.record.environment import EnvironmentPart
from harness.record.error import ErrorPart
from harness.record.given import GivenPart
from harness.record.model import DataPart, LayoutPart, ModelPart, ObservedPart, WeightsPart
from harness.record.observation import ObservationPart
from harness.record.part import Part
from harness.record.prediction import PredictionPart
from harness.record.ranks import RankPart
from harness.record.settings import RecordedJob, RecordedMeasure
from harness.record.steps import EvaluationPart, StepPart, WindowsPart
from harness.record.world import WorldPart
from harness.spec import Price, Question

SCHEMA_VERSION: Literal[2] = 2
Status = Literal["ok", "oom", "failed", "timeout", "diverged", "unsupported"]


def with_details(effective: Any) -> Any:
    """What a backend says really runs, with fields that only its library knows among the details."""
    if is_dataclass(effective) and not isinstance(effective, type):
        effective = asdict(effective)
    if not isinstance(effective, dict):
        return effective
    own = effective.keys() - {field.name for field in fields(Effective)}
    details = effective.get("details") or {}
    if not own or not isinstance(details, dict):
        return effective
    known = {key: value for key, value in effective.items() if key not in own}
    return known | {"details": {key: effective[key] for key in effective if key in own} | details}


ArtifactKind = Literal["trace", "memory snapshot", "checkpoint"]


class ArtifactPart(Part):
    """A file or folder next to the record."""

    kind: ArtifactKind
    """What it is."""
    path: str
    """Relative to the record's folder."""
    rank: int | None = None
    """The rank that wrote it; None: all of them."""


def as_artifacts(value: Any) -> Any:
    """Artifacts as a list; earlier records map 'trace of rank 0' to the path."""
    if not isinstance(value, dict):
        return value
    named = ((name.partition(" of rank "), path) for name, path in value.items())
    return [{"kind": kind, "rank": rank or None, "path": path} for (kind, _, rank), path in named]


class BackendPart(Part):
    """Which backend, and what it really ran."""

    label: str
    """Name with the options given: 'zero3:offload=cpu'."""
    name: str
    """Name in the registry."""
    options: dict[str, Any] = {}
    """Options with their values, as they were given."""
    effective: Annotated[Effective | None, BeforeValidator(with_details)] = None
    native_config: dict[str, Any] | None = None
    """The configuration that the library was handed, where it takes one."""
    versions: dict[str, str] = {}
    """Versions of the backend's libraries."""
    claim: StrategyKind | None = None
    """The strategy that a third party's backend claims to be; None: a built-in one, or nothing claimed."""
    own_forms: OwnForms | None = None
    """Closed forms that a third party's backend brought, in place of those of a family."""
    given: GivenPart | None = None
    """The configuration file of another tool that its settings came from; None: there was none."""

    @property
    def own_preset(self) -> str | None:
        """The preset that the label names for this row; None: it ran under the experiment's."""
        return self.options.get("preset")

    @property
    def shard_size(self) -> int | None:
        """Ranks of a shard group as the backend says; None: it does not."""
        said = self.effective.details.get("shard_size") if self.effective else None
        return said if isinstance(said, int) else None

    def in_force(self) -> dict[str, Any] | None:
        """`effective` as a document; what earlier records lack is left out where it is unknown."""
        if self.effective is None:
            return None
        document = asdict(self.effective)
        if document["optimizer_implementation"] is None:
            del document["optimizer_implementation"]
        return document


class Record(Part):
    """One run, self-contained."""

    schema_version: Literal[2] = SCHEMA_VERSION
    """Version of this schema."""
    run_id: str
    """Name of the run's folder."""
    created_at: str
    """Start of the run, UTC, ISO 8601."""
    status: Status
    """How the run ended."""
    error: ErrorPart | None = None
    """Why there is no result, or only a part; None: nothing failed."""
    reasons: list[str] = []
    """Why the backend is unsupported here."""
    command: KeptCommand
    """The command line that asked for this run."""
    job: RecordedJob
    """Settings that decide the mathematics, every default written out."""
    job_id: str
    """Hash of what is trained; only runs with equal ids are compared."""
    resumed: ResumedPart | None = None
    """The checkpoint that the run continued; None: it began at its first step."""
    cell: str
    """Key of job, backend, world, repeat, measurement and code: equal cells need not run again."""
    repeat: int
    """Number of the repetition within its cell, from 0."""
    measure: RecordedMeasure | None = None
    """The settings of measurement; None in records from before they were kept."""
    question: Question | None = None
    """What its comparison was made to answer; None in records from before it was kept."""
    price_per_gpu_hour: Price | None = None
    """As the user gave it; None: not given."""
    backend: BackendPart
    world: WorldPart
    environment: EnvironmentPart
    layout: LayoutPart | None = None
    model: ModelPart | None = None
    data: DataPart | None = None
    initial_weights: WeightsPart | None = None
    """Master weights before the first step."""
    final_weights: WeightsPart | None = None
    """Master weights after the last step."""
    observed: ObservedPart | None = None
    observation: ObservationPart | None = None
    """How the run was observed; None: the harness ran its own loop."""
    steps: list[StepPart] = []
    """Every optimizer step, over all ranks."""
    ranks: list[RankPart] = []
    """What each rank measured."""
    comm: list[CommunicationPart] = []
    """Collectives of each rank."""
    eval: list[EvaluationPart] = []
    """Evaluations, over all ranks."""
    answers: AnswersPart | None = None
    """Answers to the held-out questions after the training; None: none were asked for, or the run ended."""
    windows: WindowsPart | None = None
    prediction: PredictionPart | None = None
    """None in records from before runs were predicted, and where no prediction could be made."""
    skipped_steps: int = 0
    """Updates that a loss scaler skipped."""
    artifacts: Annotated[list[ArtifactPart], BeforeValidator(as_artifacts)] = []
    """Files and folders next to the record."""

    @property
    def on_stub(self) -> bool:
        """Whether a device was a CUDA stub, on which no kernel runs: durations then say nothing at all."""
        return any(is_stub(rank.device_name) for rank in self.ranks)
