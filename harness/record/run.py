"""One run, self-contained: the backend that it ran under, its ranks, how it ended, and what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic_core import PydanticCustomError

from harness.backends.base import Effective
from harness.backends.mesh import Dimension, Mesh
from harness.backends.refusals import explain_refusal
from harness.backends.registry import BUILT_IN
from harness.backends.strategy import StrategyKind
from harness.bounds import MOST_RANKS
from harness.files import added_later
from harness.forms.layout import Derivations, Layout
from harness.forms.terms import OwnForms
from harness.forms.textbook import is_stub
from harness.job.experiment import MeasureSection, Price, ReportFocus
from harness.job.job import Job, SettingsSection
from harness.record import measured
from harness.safe_text import MOST_MESSAGE_BYTES, KeptCommand, capped


class GeometryPart(measured.Part):
    """What closed forms of the arithmetic need to know of a decoder."""

    multiplying_parameters: int
    """Parameters that every token is multiplied with."""
    layers: int
    """Number of transformer blocks."""
    attention_width: int
    """Heads times their dimension."""


class ModelPart(measured.Part):
    """What was really built."""

    architecture: str
    """Class of the model, such as 'LlamaForCausalLM'."""
    attention: str | None
    """The attention kernel; None: the model does not say."""
    parameters: measured.Count
    """Number of parameters; a tied tensor counts once."""
    tied_parameters: measured.Count
    """Names that tied parameters have beyond their first."""
    activation_checkpointing: bool
    """Whether blocks recompute their activations."""
    whole_because: str | None = None
    """Why every rank built it whole although runtime.loading asked for less; None: nothing did."""
    geometry: GeometryPart | None = None
    """None where the closed forms do not hold."""
    config: dict[str, Any]
    """Values of the Hugging Face configuration that differ from its defaults; empty: it has none."""


class DataPart(measured.Part):
    """Sizes of the data."""

    samples: measured.Count
    """Samples altogether."""
    training_samples: measured.Count
    """Samples that training draws from."""
    evaluation_samples: measured.Count
    """Samples held out."""
    target_tokens: measured.Count
    """Labels that count in the loss, over all samples: tokens of text, one of each classified sample."""
    vocabulary_size: int | None = None
    """Tokens that the tokenizer knows; None: there is none."""
    classes: int | None = None
    """Classes of a classification."""
    misplaced_labels: int = 0
    """Labels that are not the token at their position, over all samples; of causal-lm only."""


DIGEST_KIND = "-sum64"
"""Ends a digest of weights; older records have SHA-256 of the bytes and no such end."""


def weights_differ(left: str | None, right: str | None) -> bool:
    """Whether two digests of weights tell different ones; of two kinds, or without one, they tell nothing."""
    if left is None or right is None or left.endswith(DIGEST_KIND) != right.endswith(DIGEST_KIND):
        return False
    return left != right


class WeightsPart(measured.Part):
    """All master weights at one moment."""

    digest: str
    """SHA-256 over the sorted (name, shape, sum of the fp32 bits: `rank/probes/sketch.py`), and
    DIGEST_KIND."""
    l2_norm: float | None
    """L2 norm of all weights; None: not finite."""
    parameter_count: measured.Count
    """Number of weights; a tied tensor counts once."""
    sketch: dict[str, list[float]] | None = None
    """Of each parameter its L2 norm and projections on fixed sign vectors: see `rank/probes/sketch.py`.
    None: not taken, or some weight is not finite."""
    copied_elements: int | None = None
    """Weights that forward passes use and that are copies of masters, over all ranks; None: there are none,
    the backend does not show them, or the record is older."""
    stale_elements: int | None = None
    """Those of them that are not their master, rounded to their dtype."""
    apart: dict[str, float] = added_later({})
    """Of parameters of which ranks hold different copies, the largest estimated L2 distance of two."""


class SplitPart(measured.Part):
    """Whether the gradient of a batch hangs on how it is cut: of the first batches, where it does most."""

    difference: float
    """Distance of the gradient of a batch from the sum over its two halves, relative."""
    repetition: float
    """The same of the batch taken twice: more than rounding where the loss draws random numbers, or a
    forward pass changes what the next one reads."""
    rounding: float
    """What rounding explains at most."""
    by_samples: float | None = None
    """Where one batch has another gradient each time: how far samples or chance change it, relative. The
    larger of two distances: of the sum over halves that find the same state, and of the batch after other
    samples. None: not measured."""

    @property
    def varies(self) -> bool:
        """Whether one batch has another gradient each time."""
        return not self.repetition <= self.rounding

    @property
    def counts_passes(self) -> bool:
        """Whether that hangs on how many passes there were alone, as in the power iteration of a spectral
        norm."""
        return self.varies and self.by_samples is not None and self.by_samples <= self.rounding

    @property
    def is_random(self) -> bool:
        """Whether it hangs on chance, or on the samples that there were."""
        return self.varies and not self.counts_passes

    @property
    def depends(self) -> bool:
        return self.varies or not self.difference <= self.rounding


class ModelLossPart(measured.Part):
    """The loss that the model returns, beside the job's of the same outputs: of one batch, at the end."""

    model: float
    """As the model returns it of labels, in nats: a mean over targets, and what else the model adds."""
    job: float
    """The mean of the loss that the job trains, in nats per target token."""
    targets: int
    """Target tokens of the batch."""


OUTSIDE = "outside"
"""Between the end of a step's clock and the begin of the next one's."""


def _with_names(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for names in (group.get("parameters", []) for group in groups):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("parameters of a group must be a list of names")
    return groups


class ObservedPart(measured.Part):
    """What the harness saw of a run without asking the backend; None: it could not see."""

    parameters_left_out: list[str] = []
    """Parameters of the model that no optimizer that trains was given."""
    optimizer_used: bool = False
    """Whether the optimizer that the job built is among those that train."""
    optimizer_steps: measured.Count | None = None
    """Updates that the optimizers made."""
    optimizer_groups: Annotated[list[dict[str, Any]], pydantic.AfterValidator(_with_names)] = []
    """Constants of each group of the optimizers that train, whoever built them, and the names of its
    parameters where they can be known; of an observed script also its last rate, its dtypes and the number
    of its tensors."""
    learning_rates: list[list[float | None]] = []
    """Of each of these groups its rate in every step that was taken; []: that of the steps."""
    constants_by_step: dict[int, list[dict[str, Any]]] = {}
    """Constants of these groups by the first step at whose end they were seen, before or after whose update
    they changed; {}: they never did."""
    updated_tensors: int | None = None
    """Tensors with a gradient that the optimizers of an observed script were given in one of the first
    steps, on rank 0; None: not looked at."""
    updates_by_phase: dict[str, int] = {}
    """How often torch optimizers stepped in the first steps, by what the loop did: 'step' as it should be;
    'outside': after a step's time was taken, before that of the next began. Empty: none stepped."""
    evaluating_in_training: list[str] | None = None
    """Modules that behave otherwise in training, such as dropout, and were in evaluation mode in a training
    pass; None: not looked at, as in compiled models or an older record."""
    training_in_evaluation: list[str] | None = None
    """The same: in training mode in an evaluation pass, that at the end of the training included."""
    buffers: dict[str, str] = {}
    """Digest of the values of each buffer of floating-point numbers when the first step begins; {}: there are
    none, an older record, or an observed script."""
    still_buffers: list[str] | None = None
    """Those of them that have the same values after the last step; None: not looked at, or there are none."""
    compute_dtype: str | None = None
    """Of most outputs of linear layers and convolutions in the first steps; None: none was seen."""
    products_otherwise: dict[str, list[str]] = added_later({})
    """Linear layers and convolutions whose outputs had another dtype than most, by dtype."""
    model_loss: ModelLossPart | None = None
    """None: the model returns no loss, is compiled or divided, or the job has a loss of its own."""
    master_dtypes: list[str] = []
    """Of the tensors that the optimizer updates."""
    optimizer_state_dtypes: list[str] = []
    """Of the moments that the optimizer keeps."""
    wide_optimizer_bytes: measured.Count | None = None
    """Of moments in full width that an 8-bit optimizer of the job could hold in 8 bits; None: it has none."""
    matrices_in_parts: int | None = None
    """Matrices of which no optimizer of a Muon job keeps the momentum whole; None: another optimizer."""
    wide_linears: int | None = None
    """Linear layers of blocks that do not multiply in fp8; None: the run is not to do so."""
    tied_parameters: measured.Count | None = None
    """Names that tied parameters have beyond their first, in the live model."""
    frozen_parameters: list[str] = []
    """Parameters that need no gradient, beyond those that the job freezes."""
    frozen_dtypes: list[str] = []
    """Of the weights that the job freezes, as the live model holds them."""
    attention: str | None = None
    """The attention kernel of the live model."""
    activation_checkpointing: bool | None = None
    """Whether blocks recompute their activations."""
    compiled: bool | None = None
    """Whether a module is compiled by torch.compile."""
    compiled_graphs: int | None = None
    """Graphs that the compiler made in a rank's process; None: nothing is compiled."""
    graph_breaks: int | None = None
    """Places where Python code interrupts a graph."""
    recompilations: int | None = None
    """Functions compiled once more because what their code assumed no longer held."""
    dropout: float | None = None
    """The largest probability in the live model."""
    draws: bool | None = added_later(None)
    """Whether forward passes of the first steps drew random numbers of torch's generators, on any rank."""
    tf32: bool | None = None
    """Whether matrix products on CUDA may use TF32."""
    deterministic: bool | None = None
    """Whether torch uses deterministic kernels. Not if CUDA's attention would only warn."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_counts(cls, values: Any) -> Any:
        """Older records have what the reference counted where values decide what runs."""
        return {k: v for k, v in values.items() if k != "counted"} if isinstance(values, dict) else values


Settings = TypeVar("Settings", bound=SettingsSection)


def _as_recorded(kind: type[Settings]) -> pydantic.WrapValidator:
    def read(value: Any, validate: pydantic.ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except pydantic.ValidationError:
            return value if isinstance(value, kind) else _unchecked(kind, value)

    return pydantic.WrapValidator(read)


def _unchecked(kind: type[pydantic.BaseModel], value: Any) -> pydantic.BaseModel:
    """The settings as they stand, with defaults for those that are missing; an unknown one is refused.

    None, whatever the type, is what was not seen of an observed script.
    """
    if not isinstance(value, dict):
        raise PydanticCustomError("settings", "these are not settings")
    unknown = sorted(value.keys() - kind.model_fields.keys())
    if unknown:
        raise PydanticCustomError("settings", "setting '{name}' is unknown", {"name": unknown[0]})
    for name, item in value.items():
        if item is not None and not isinstance(item, _types(kind.model_fields[name].annotation)):
            raise PydanticCustomError("settings", "setting '{name}' has another type", {"name": name})
    sections: dict[str, Any] = {
        name: _unchecked(annotation, item)
        if item is not None
        and isinstance(annotation := kind.model_fields[name].annotation, type)
        and issubclass(annotation, pydantic.BaseModel)
        else item
        for name, item in value.items()
    }
    return kind.model_construct(**sections)


def _types(annotation: Any) -> tuple[type, ...]:
    """What JSON can hold for an annotation, whatever bounds and choices it has."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _types(inside[0])
    if origin in (Union, UnionType):
        return tuple({kind for part in inside for kind in _types(part)})
    if origin is Literal:
        return (str, bool, int, float, NoneType)  # earlier versions had switches where there are choices now
    kind = origin or annotation
    if kind is float:
        return (float, int)
    if kind in (bool, int, str, NoneType, list, dict):
        return (kind,)
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return (dict,)
    return (object,)


def seen_job(seen: Mapping[str, Any]) -> Job:
    """A job of which only these settings are known, such as {'training.precision': 'fp32'}.

    All others are None, whatever their type says: what is not known of an observed script is not guessed.
    """
    sections: dict[str, Any] = {}
    for name, field in Job.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, pydantic.BaseModel):
            values = {key: seen.get(f"{name}.{key}") for key in section.model_fields}
            sections[name] = section.model_construct(**values)
        else:
            sections[name] = seen.get(name)
    return Job.model_construct(**sections)


RecordedJob = Annotated[Job, _as_recorded(Job)]
RecordedMeasure = Annotated[MeasureSection, _as_recorded(MeasureSection)]


class DimensionPart(measured.Part):
    """One dimension of the ranks."""

    name: Dimension
    """What ranks along it divide: 'data' and 'shard' the samples, 'tensor' each layer, 'sequence' each
    sample, 'pipeline' the layers."""
    size: int = pydantic.Field(ge=1, le=MOST_RANKS)
    """Ranks along it."""


class WorldPart(measured.Part):
    """The ranks, and how the global batch was cut over them."""

    nodes: int = pydantic.Field(ge=1, le=MOST_RANKS)
    """Machines that the ranks ran on."""
    ranks_per_node: int = pydantic.Field(ge=1, le=MOST_RANKS)
    """Ranks on each of them."""
    world_size: int = pydantic.Field(ge=1, le=MOST_RANKS)
    """Ranks altogether."""
    device: Literal["cpu", "cuda"]
    """What ranks compute on; 'cuda' is that of ROCm, too."""
    collectives: str
    """Transport of the collectives: 'gloo' or 'nccl'."""
    threads_per_rank: int
    """CPU threads of each rank."""
    micro_batch_size: pydantic.PositiveInt
    """Samples per rank and forward pass."""
    accumulation_steps: pydantic.PositiveInt
    """Forward passes per optimizer step and rank."""
    preset: str
    """`runtime.preset`: settings shared by all libraries, or their own defaults."""
    memory_limit_bytes: measured.Count | None = None
    """What torch's allocator was allowed to serve of each rank's device; None: all of it."""
    dimensions: list[DimensionPart] = []
    """How the ranks are laid out, outermost first; empty: each of them has samples of its own."""

    @property
    def mesh(self) -> Mesh:
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


class RankStatePart(measured.Part):
    """Where one rank of a run was when the run had to be ended."""

    rank: measured.Count
    """Global rank."""
    step: measured.Count | None = None
    """None: it was not in a training step."""
    phase: str | None = None
    """None: the rank did not report one."""
    collective: str | None = None
    """The collective that it waited in; None: in none, or not known."""
    stack: str = ""
    """Python stacks of its threads; empty where it could not write them."""
    note: str = ""
    """What else is known: the process was stopped, or gone."""


class ErrorPart(measured.Part):
    """Why a run has no result, or not a whole one."""

    kind: str
    """Exception, or how the run ended: 'Exit', 'Stuck', 'Timeout', 'Interrupted', 'LauncherLost' ..."""
    message: Annotated[str, pydantic.AfterValidator(lambda text: capped(text, 2 * MOST_MESSAGE_BYTES))]
    """What happened, in one line."""
    rank: measured.Count | None = None
    """The rank at fault; None: not one rank, or not known."""
    exit_code: int | None = None
    """Of that rank's process; negative: killed by that signal. None: it did not end by itself."""
    step: measured.Count | None = None
    """The step that this rank was in; None: it was not in one."""
    phase: str | None = None
    """What this rank was doing: 'forward', 'setup', 'evaluation' ..."""
    log_tail: str = ""
    """End of the log of the rank at fault, 32 KB at most."""
    ranks: list[RankStatePart] = []
    """Of a run that had to be ended: where each rank was."""


FileKind = Literal["accelerate", "deepspeed"]
GivenMode = Literal["like-for-like", "exactly-as-given"]


class GivenSettingPart(measured.Part):
    """One key of the file and what became of it."""

    key: str
    """Dotted, as in the file."""
    given: Any
    """Its value in the file; None: not given, so that the tool's own default counts."""
    handling: Literal["taken", "pinned"]
    """taken: the run has the value; pinned: it has another one, or the key has no effect on a run."""
    used: Any = None
    """What the run has; None: nothing that corresponds to the key."""
    setting: str | None = None
    """The job's setting, or the backend's option, that the key became."""
    reason: str | None = None
    """Why a key was pinned, or what else to know."""


class GivenPart(measured.Part):
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


PADDING, LABELLED = "padding_tokens", "labelled_padding_tokens"
"""Figures of the steps of observed scripts whose batches have padding."""
OF_PASS, OF_UPDATE = "gradient_of_pass", "gradient_of_update"
"""Figures of one gradient of a rank of an observed script: as its backward pass ends, and before clipping."""
SAMPLER_SEED = "sampler_seed"
"""Figure of the first step after a sampler began to shuffle what it divides over ranks: its seed."""
PER_TOKEN = "averaged over target tokens"
"""Ends what says where an observed script's loss is from, if it is per token."""


class ObservationPart(measured.Part):
    """What a script ran on, what its figures are taken from, and what could not be known.

    Of such a run `job` holds the settings that were seen. Those that were not are null.
    """

    command: KeptCommand
    """The command that was observed."""
    label: str = added_later("")
    """What `observe --label` called it."""
    files: dict[str, str] = {}
    """Digest of each file that the command names."""
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
    judged_by: str | None = added_later(None)
    """Label of the script's run that others of its comparison are judged by; None: it was run alone."""
    has_loader: bool = True
    """Whether batches were seen to come from a data loader: else `ranks[].data_seconds` is all that a script
    does before its forward passes."""
    parts: int = added_later(1)
    """Into how many parts loaders were seen to divide samples, one for each rank; 1: none was."""
    labels_ahead: int = added_later(0)
    """Of the first steps, those whose labels were the next tokens already, and whose model shifts them."""
    world_left_out: int = added_later(0)
    """Steps whose summed losses were divided by the targets of all ranks, and not multiplied by the ranks."""
    shuffles: list[int] = added_later([])
    """The first steps before which a sampler began to shuffle all samples that a rank has."""
    repeated_epochs: int = 0
    """Times that a sampler that shuffles was gone through once more with the same epoch or random state."""
    further_passes: int = 0
    """Backward passes that followed another one of the same forward pass."""
    unwrapped: dict[str, int] = {}
    """Elements that train in modules which nothing wraps, by class, where something wraps the largest."""
    backward_ratio: float | None = None
    """What backward() got in a step over the mean of its micro-steps' losses, if it is the same in all steps:
    1 where gradients are those of the mean; None: not known, or a step has one micro-step."""
    shorter_ratios: dict[int, float] = added_later({})
    """The same of steps with fewer or more micro-steps, by their number."""
    kept_gradients: int = 0
    """Of the first updates, those whose gradients were never gone since the update before."""
    clipped_within: int = added_later(0)
    """The same, those with gradients that were clipped before a later micro-step added to them."""
    clipped_empty: int = added_later(0)
    """Calls of torch's clipping that got no gradient."""
    scheduler_calls: int | None = None
    """Calls of a scheduler per update where they are several, and do not end with its schedule; 1: each comes
    before its update; 0: its optimizer never updates."""
    still_scaled: int = added_later(0)
    """Of two of the first updates, those given, or cut by value, while a scaler multiplied the gradients."""
    masks_repeated: int = added_later(0)
    """Of the first steps, those that drew from a random state in which an earlier one had begun."""
    weights_apart: dict[int, list[str]] = added_later({})
    """The first step of those looked at (0 and powers of two) that ranks begin with unlike bits in tensors
    that train, with these tensors."""
    discarded: int = added_later(0)
    """Micro-steps whose gradients were zeroed before an update."""
    stood_still: list[str] = added_later([])
    """Tensors of low precision whose bits are at the last such step what they were at the first, though an
    optimizer has moments of them."""
    states_changed: list[int] = added_later([])
    """Of the first such, the steps whose update found other moments than the one before left."""
    evaluations_in_training: list[int] = added_later([])
    """Steps before which passes without gradients ran in training mode."""
    evaluating_since: int | None = None
    """The first step whose model was in evaluation mode."""
    added: list[str] = added_later([])
    """Parameters that train in the wrapped model, and that were added to it after it was wrapped."""
    replaced: list[str] = added_later([])
    """Those that no optimizer has, where one has tensors of no module in their place that get no gradient."""
    is_moved: bool = added_later(False)
    """Whether every weight was moved to the next number before the first step: what then differs is what
    rounding alone may change."""
    has_form: bool = True
    """False: after its first step the script did what closed forms do not know, as `notes` says."""
    notes: list[str] = []
    """What a reader must know of the figures."""


Verdict = Literal["fits", "close", "tight", "does not fit"]
"""`tight` is what earlier records call `close`: above nine tenths of the limit."""


class PredictionPart(measured.Part):
    """Predicted memory of the rank that needs most, and the memory that there was."""

    peak_bytes: measured.Count
    """Peak of torch's allocator in an ordinary step."""
    moment: str
    """The moment of the step that has it: 'forward/backward', 'gradient reduction' or 'optimizer step'."""
    kinds: dict[str, int]
    """Bytes by kind at that moment; their sum is `peak_bytes`."""
    device_bytes: measured.Count
    """The peak and what lies beside the allocator: context, buffers of NCCL."""
    device_limit_bytes: measured.Count | None = None
    """Memory of a rank's device, or what `runtime.memory_limit` leaves of it; None: not known."""
    host_bytes: measured.Count
    """Of all ranks of a node, at least: each builds the whole model; on CUDA also offloaded states."""
    host_limit_bytes: measured.Count | None = None
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


class ArtifactPart(measured.Part):
    """A file or folder next to the record."""

    kind: ArtifactKind
    """What it is."""
    path: str
    """Relative to the record's folder."""
    rank: measured.Count | None = None
    """The rank that wrote it; None: all of them."""


class BackendPart(measured.Part):
    """Which backend, and what it really ran."""

    label: str
    """Name with the options given: 'zero3:offload=cpu'."""
    name: str
    """Name in the registry."""
    options: dict[str, Any] = {}
    """Options with their values, as they were given."""
    effective: Annotated[Effective | None, pydantic.BeforeValidator(with_details)] = None
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

    @pydantic.field_validator("options")
    @classmethod
    def _can_be_computed_with(cls, options: dict[str, Any], info: pydantic.ValidationInfo) -> dict[str, Any]:
        """Those of built-in backends; words of a later version are let through."""
        if options and (entry := BUILT_IN.get(info.data.get("name", ""))) is not None:
            known = entry.options_class()
            try:
                known.model_validate({key: options[key] for key in options.keys() & known.model_fields})
            except pydantic.ValidationError as error:
                if any(
                    e["type"] != "literal_error" or not isinstance(e["input"], str) for e in error.errors()
                ):
                    raise ValueError(explain_refusal(error, known)) from error
        return options

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


class Record(Derivations, measured.Part):
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
    resumed: measured.ResumedPart | None = None
    """The checkpoint that the run continued; None: it began at its first step."""
    cell: str
    """Key of job, backend, world, repeat, measurement and code: equal cells need not run again."""
    repeat: measured.Count
    """Number of the repetition within its cell, from 0."""
    measure: RecordedMeasure | None = None
    """The settings of measurement; None in records from before they were kept."""
    question: ReportFocus | None = None
    """What its comparison was made to answer; None in records from before it was kept."""
    price_per_gpu_hour: Price | None = None
    """As the user gave it; None: not given."""
    backend: BackendPart
    world: WorldPart
    environment: measured.EnvironmentPart
    layout: Layout | None = None
    model: ModelPart | None = None
    data: DataPart | None = None
    initial_weights: WeightsPart | None = None
    """Master weights before the first step."""
    final_weights: WeightsPart | None = None
    """Master weights after the last step."""
    moment_norms: dict[str, tuple[float, float]] = added_later({})
    """By parameter, of Adam's moments after the last step: L2 norm of the first, and the root of the sum of
    the second, which is that of squared gradients averaged over the last steps. {}: another optimizer,
    weights were not digested, the backend does not list its pieces, or an older record."""
    split: SplitPart | None = None
    """None: not measured, as in all runs but the reference, or a sum over samples by construction."""
    update_of_part: float | None = added_later(None)
    """Of an optimizer of the user's own: how far the updates of half a matrix, flattened and alone, lie from
    the same half of the whole matrix's, over their size. 0 where each element is updated on its own; None: a
    known optimizer, or one that could not be tried."""
    observed: ObservedPart | None = None
    observation: ObservationPart | None = None
    """How the run was observed; None: the harness ran its own loop."""
    steps: list[measured.StepPart] = []
    ranks: list[measured.RankPart] = []
    comm: list[measured.CommunicationPart] = []
    eval: list[measured.EvaluationPart] = []
    """Evaluations, over all ranks."""
    answers: measured.AnswersPart | None = None
    """Answers to the held-out questions after the training; None: none were asked for, or the run ended."""
    windows: measured.WindowsPart | None = None
    turns: measured.TurnsPart | None = None
    """In which turns the timed steps were taken; None: one after the other, by this cell alone."""
    prediction: PredictionPart | None = None
    """None in records from before runs were predicted, and where no prediction could be made."""
    skipped_steps: measured.Count = 0
    """Updates that a loss scaler skipped."""
    artifacts: list[ArtifactPart] = []

    def model_copy(self, **changes: Any) -> Record:
        """The record with other values, from which nothing was derived yet."""
        copied = super().model_copy(**changes)
        copied.__dict__.pop("_derived", None)
        return copied

    @property
    def probed_steps(self) -> int:
        return self.windows.probed if self.windows else 0

    @property
    def last_loss(self) -> float | None:
        return self.steps[-1].loss if self.steps else None

    @property
    def was_interrupted(self) -> bool:
        return self.error is not None and self.error.kind == "Interrupted"

    @property
    def on_stub(self) -> bool:
        """Whether a device was a CUDA stub, on which no kernel runs: durations then say nothing at all."""
        return any(is_stub(rank.device_name) for rank in self.ranks)
