"""One run, self-contained: the backend that it ran under, its ranks, how it ended, and what was predicted."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from harness.backends.base import Effective
from harness.backends.mesh import Dimension, Mesh
from harness.backends.strategy import StrategyKind
from harness.bounds import MOST_RANKS
from harness.forms.flops import is_stub
from harness.forms.terms import OwnForms
from harness.job.experiment import Price, ReportFocus
from harness.record.environment import EnvironmentPart
from harness.record.model import DataPart, LayoutPart, ModelPart, ObservedPart, SplitPart, WeightsPart
from harness.record.part import Part
from harness.record.ranks import (
    AnswersPart,
    CommunicationPart,
    EvaluationPart,
    RankPart,
    ResumedPart,
    StepPart,
    TurnsPart,
    WindowsPart,
)
from harness.record.settings import RecordedJob, RecordedMeasure
from harness.safe_text import MOST_MESSAGE_BYTES, KeptCommand, capped


class DimensionPart(Part):
    """One dimension of the ranks."""

    name: Dimension
    """What ranks along it divide: 'data' and 'shard' the samples, 'tensor' each layer, 'sequence' each
    sample, 'pipeline' the layers."""
    size: int = Field(ge=1, le=MOST_RANKS)
    """Ranks along it."""


class WorldPart(Part):
    """The ranks, and how the global batch was cut over them."""

    nodes: int = Field(ge=1, le=MOST_RANKS)
    """Machines that the ranks ran on."""
    ranks_per_node: int = Field(ge=1, le=MOST_RANKS)
    """Ranks on each of them."""
    world_size: int = Field(ge=1, le=MOST_RANKS)
    """Ranks altogether."""
    device: str
    """'cpu' or 'cuda'."""
    collectives: str
    """Transport of the collectives: 'gloo' or 'nccl'."""
    threads_per_rank: int
    """CPU threads of each rank."""
    micro_batch_size: PositiveInt
    """Samples per rank and forward pass."""
    accumulation_steps: PositiveInt
    """Forward passes per optimizer step and rank."""
    preset: str
    """`runtime.preset`: settings shared by all libraries, or their own defaults."""
    memory_limit_bytes: int | None = None
    """What torch's allocator was allowed to serve of each rank's device; None: all of it."""
    dimensions: list[DimensionPart] = []
    """How the ranks are laid out, outermost first; empty: each of them has samples of its own."""

    @property
    def mesh(self) -> Mesh:
        """The dimensions of the ranks."""
        sizes = tuple((part.name, part.size) for part in self.dimensions)
        return Mesh(sizes) if sizes else Mesh.data_parallel(self.world_size)

    @property
    def layout(self) -> str:
        """How the ranks are laid out: 'data 2 x tensor 2'."""
        return str(self.mesh) if self.dimensions else "data parallel"

    @property
    def data_size(self) -> int:
        """Ranks, or groups of ranks, with samples of their own."""
        return self.mesh.data_size


class RankStatePart(Part):
    """Where one rank of a run was when the run had to be ended."""

    rank: int
    """Global rank."""
    step: int | None = None
    """None: it was not in a training step."""
    phase: str | None = None
    """None: the rank did not report one."""
    collective: str | None = None
    """The collective that it waited in; None: in none, or not known."""
    stack: str = ""
    """Python stacks of its threads; empty where it could not write them."""
    note: str = ""
    """What else is known: the process was stopped, or gone."""


class ErrorPart(Part):
    """Why a run has no result, or not a whole one."""

    kind: str
    """Exception, or how the run ended: 'Exit', 'Stuck', 'Timeout', 'Interrupted', 'LauncherLost' ..."""
    message: Annotated[str, AfterValidator(lambda text: capped(text, 2 * MOST_MESSAGE_BYTES))]
    """What happened, in one line."""
    rank: int | None = None
    """The rank at fault; None: not one rank, or not known."""
    exit_code: int | None = None
    """Of that rank's process; negative: killed by that signal. None: it did not end by itself."""
    step: int | None = None
    """The step that this rank was in; None: it was not in one."""
    phase: str | None = None
    """What this rank was doing: 'forward', 'setup', 'evaluation' ..."""
    log_tail: str = ""
    """End of the log of the rank at fault, 32 KB at most."""
    ranks: list[RankStatePart] = []
    """Of a run that had to be ended: where each rank was."""


FileKind = Literal["accelerate", "deepspeed"]
GivenMode = Literal["like-for-like", "exactly-as-given"]


class GivenSettingPart(Part):
    """One key of the file and what became of it."""

    key: str
    """Dotted, as in the file."""
    given: Any
    """Its value in the file; None: not given, so that the tool's own default counts."""
    handling: Literal["taken", "pinned"]
    """taken: the run has the value; pinned: it has another one, or the key has no part in a run."""
    used: Any = None
    """What the run has; None: nothing that corresponds to the key."""
    setting: str | None = None
    """The job's setting, or the backend's option, that the key became."""
    reason: str | None = None
    """Why a key was pinned, or what else to know."""


class GivenPart(Part):
    """A file of Accelerate or DeepSpeed, key by key."""

    file: str
    """Its name, without folders."""
    kind: FileKind
    """Which tool reads it."""
    mode: GivenMode
    """like-for-like: job and preset pin what would make rows differ; exactly-as-given: the file wins."""
    sha256: str
    """Digest of the file."""
    settings: list[GivenSettingPart]
    """Every key, in the order of the file, then keys that it does not give, with the tool's defaults."""

    @property
    def pinned(self) -> list[GivenSettingPart]:
        return [setting for setting in self.settings if setting.handling == "pinned"]


class ObservationPart(Part):
    """What a script ran on, what its figures are taken from, and what could not be known.

    Of such a run `job` holds the settings that were seen. Those that were not are null.
    """

    command: KeptCommand
    """The command that was observed."""
    frameworks: list[str]
    """Libraries that drove the training, such as 'accelerate' or 'lightning', with their versions."""
    base: str | None = None
    """The built-in backend that runs the same strategy, such as 'fsdp'; None: there is none."""
    loss: str = ""
    """What the loss of the steps is taken from."""
    learning_rates: list[list[float | None]] = []
    """Of each group of the optimizers, in the order of `observed.optimizer_groups`, the rate in each step;
    None: the group has no rate, or its optimizer did not step."""
    unknown: dict[str, str] = {}
    """Fields of the record that are n/a, each with the reason."""
    synchronised_at: int | None = None
    """The step, from 0, before which ranks whose passes exchange nothing were first seen to exchange weights
    or gradients; None: they were not, or their passes do."""
    has_form: bool = True
    """False: after its first step the script did what closed forms do not know, as `notes` says."""
    notes: list[str] = []
    """What a reader must know of the figures."""


Verdict = Literal["fits", "close", "tight", "does not fit"]
"""`tight` is what earlier records call `close`: above nine tenths of the limit."""


class PredictionPart(Part):
    """Predicted memory of the rank that needs most, and the memory that there was."""

    peak_bytes: int
    """Peak of torch's allocator in an ordinary step."""
    moment: str
    """The moment of the step that has it: 'forward/backward', 'gradient reduction' or 'optimizer step'."""
    kinds: dict[str, int]
    """Bytes by kind at that moment; their sum is `peak_bytes`."""
    device_bytes: int
    """The peak and what lies beside the allocator: context, buffers of NCCL."""
    device_limit_bytes: int | None = None
    """Memory of a rank's device, or what `runtime.memory_limit` leaves of it; None: not known."""
    host_bytes: int
    """Of all ranks of a node, at least: each builds the whole model; on CUDA also offloaded states."""
    host_limit_bytes: int | None = None
    """Memory that a node had left for its ranks; None: not known."""
    verdict: Verdict | None = None
    """None: no limit is known."""
    refused: bool = False
    """Whether the run was not started for that reason."""
    typical_error: float | None = None
    """Mean error, without sign, of such predictions for runs that were measured; None: none were."""
    error_runs: int = 0
    """How many those were."""
    assumption: str | None = None
    """The largest that the prediction rests on."""
    made_by: str
    """Version of the harness."""


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
    changed: dict[str, list[Any]] = {}
    """Fields of `effective` that the backend read back otherwise after the training: that value; and that
    before."""

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
    question: ReportFocus | None = None
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
    moment_norms: dict[str, tuple[float, float]] = Field({}, exclude_if=lambda value: not value)
    """By parameter, of Adam's moments after the last step: L2 norm of the first, and the root of the sum of
    the second, which is that of squared gradients averaged over the last steps. {}: another optimizer,
    weights were not digested, the backend does not list its pieces, or an older record."""
    split: SplitPart | None = None
    """None: not measured, as in all runs but the reference, or a sum over samples by construction."""
    update_of_part: float | None = Field(None, exclude_if=lambda value: value is None)
    """Of an optimizer of the user's own: how far the updates of half a matrix, flattened and alone, lie from
    the same half of the whole matrix's, over their size. 0 where each element is updated on its own; None: a
    known optimizer, or one that could not be tried."""
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
    turns: TurnsPart | None = None
    """In which turns the timed steps were taken; None: one after the other, by this cell alone."""
    prediction: PredictionPart | None = None
    """None in records from before runs were predicted, and where no prediction could be made."""
    skipped_steps: int = 0
    """Updates that a loss scaler skipped."""
    artifacts: list[ArtifactPart] = []
    """Files and folders next to the record."""

    @property
    def was_interrupted(self) -> bool:
        """Whether the user ended the run."""
        return self.error is not None and self.error.kind == "Interrupted"

    @property
    def on_stub(self) -> bool:
        """Whether a device was a CUDA stub, on which no kernel runs: durations then say nothing at all."""
        return any(is_stub(rank.device_name) for rank in self.ranks)
