"""The record of one run, schema version 1: everything shown to a person is computed from records.

Integers are bytes, floats seconds, values per rank and not aggregated, unless a field says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

from harness.backends.strategy import StrategyKind
from harness.theory.terms import OwnForms

SCHEMA_VERSION: Literal[1] = 1
Status = Literal["ok", "oom", "failed", "timeout", "diverged", "unsupported"]
Window = Literal["warmup", "counted", "traced", "settling", "timed"]
Moment = Literal[
    "after_setup", "after_forward", "after_backward", "after_step", "during_evaluation", "during_checkpoint"
]


class Part(BaseModel):
    """A part of a record: frozen; keys of a newer minor version are kept out by the schema version."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ErrorPart(Part):
    """Why a run has no result, or not a whole one."""

    kind: str
    message: str
    rank: int | None = None
    log_tail: str = ""


class BackendPart(Part):
    """Which backend, and what it really ran."""

    label: str
    name: str
    options: dict[str, Any] = {}
    effective: dict[str, Any] | None = None
    native_config: dict[str, Any] | None = None
    versions: dict[str, str] = {}
    claim: StrategyKind | None = None
    """The strategy that a third party's backend claims to be; None: a built-in one, or nothing claimed."""
    own_forms: OwnForms | None = None
    """Closed forms that a third party's backend brought, in place of those of a family."""


class TensorPart(Part):
    """A tensor of the model: a parameter or a buffer."""

    name: str
    shape: list[int]
    dtype: str


class LayoutPart(Part):
    """What closed forms need to know of the model, as it was before a library touched it."""

    parameters: list[TensorPart]
    """In the model's order; a tied tensor comes once, under its first name."""
    decaying: list[str]
    """Names of the parameters that decay: the optimizer has one group of them and one of the rest."""
    buffers: list[TensorPart]
    blocks: list[str]
    """Names of the transformer blocks, each of which is wrapped as one unit."""
    tied: dict[str, str] = {}
    """Further name of a tied parameter -> the name under which it stands above."""


class WorldPart(Part):
    """The ranks, and how the global batch was cut over them."""

    nodes: int
    ranks_per_node: int
    world_size: int
    device: str
    collectives: str
    """Transport of the collectives: 'gloo' or 'nccl'."""
    threads_per_rank: int
    micro_batch_size: int
    accumulation_steps: int
    preset: str


class WeightsPart(Part):
    """All master weights at one moment."""

    digest: str
    """SHA-256 over the sorted (name, SHA-256 of the fp32 bytes)."""
    l2_norm: float | None
    parameter_count: int
    sketch: dict[str, list[float]] | None = None
    """Of each parameter its L2 norm and projections on fixed sign vectors: see `worker/sketch.py`.
    None: not taken, or some weight is not finite."""


# Not a model: a report may hold millions of steps, and with slots one takes a quarter of the memory.
@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class StepPart:
    """One optimizer step over all ranks."""

    step: int
    window: Window
    loss: float | None
    """Mean cross entropy per target token of the global batch, in nats; None: not finite."""
    gradient_norm: float | None
    """Global L2 norm before clipping; None: not finite, so a loss scaler skipped the update."""
    learning_rate: float
    """As the job has it."""
    applied_learning_rate: float | None = None
    """As the optimizer holds it after the step, of all ranks and groups the one farthest from the job's;
    None: no torch optimizer trains."""
    applied_gradient_norm: float | None = None
    """Norm of the gradients that the optimizer was given, after clipping, over all ranks; of the first
    steps only. None: not looked at, or no torch optimizer stepped."""
    tokens: int
    """Tokens that are not padding, over all ranks."""
    target_tokens: int
    """Tokens whose prediction counts in the loss, over all ranks."""
    samples: int
    seconds: float
    """The slowest rank's."""
    ledger: str
    """Sum modulo 2^64 of a hash of each sample consumed, over all ranks: equal for equal samples."""


class MemoryPart(Part):
    """Memory of one rank at one moment of a counted step."""

    step: int
    moment: Moment
    allocated_bytes: int | None
    """What torch's allocator serves now."""
    peak_bytes: int | None
    """The most it served since the moment before."""
    kinds: dict[str, int] | None
    """Live bytes by kind, each storage once; None: the backend does not say. 'activations': what the
    forward pass left behind; 'data': the samples in memory; 'other': the allocator's rest."""
    outside_kinds: dict[str, int] | None = None
    """Live bytes by kind that the allocator above did not serve: on the host beside a CUDA device, mapped
    from a file, or allocated before counting began. Not in `kinds`."""
    gathered_peak_bytes: int | None = None
    """Most gathered weights at the end of a module's forward pass since the moment before."""
    gathered_least_bytes: int | None = None
    """Least gathered weights at such an end: what is gathered whatever computes."""
    reserved_bytes: int | None = None
    """CUDA: what the caching allocator holds of the device; above `allocated_bytes` it is fragmentation."""
    device_used_bytes: int | None = None
    """CUDA: the device memory of this process as the driver counts it (NVML), context and NCCL included."""
    device_used_unknown: str | None = None
    """CUDA: why the driver's figure is not there."""
    host_resident_bytes: int | None = None
    """Resident set of the process, libraries included."""
    pinned_bytes: int | None = None
    """CUDA: page-locked host memory that torch allocated."""


class WaitPart(Part):
    """A stretch of a traced step in which a rank waited for communication."""

    name: str
    """The collective that was waited for."""
    phase: str
    seconds: float


class OverlapPart(Part):
    """How one traced step of one rank divides, from the profiler.

    Computing, exposed communication and idling add up to the step.
    """

    step: int
    seconds: float
    compute_seconds: float
    """Computing, whether or not communication runs beside it."""
    communication_seconds: float
    """Communicating, whether or not computation runs beside it."""
    exposed_seconds: float
    """Communicating while nothing computes."""
    idle_seconds: float
    """Neither."""
    waits: list[WaitPart] = []
    """The ten longest, longest first."""


class RankPart(Part):
    """What one rank measured."""

    rank: int
    host: str
    device_name: str
    setup_seconds: float
    """From the start of the rank to its first step."""
    step_seconds: list[float]
    data_seconds: list[float]
    """The part of each step spent on fetching the batch."""
    phase_seconds: dict[str, list[float]] = {}
    """Per step: 'forward', 'backward' and 'step' (clipping and update), each summed over micro-steps."""
    ledger: list[str]
    """Per step, the hash sum over this rank's samples."""
    samples: list[int]
    target_tokens: list[int] = []
    loss_sums: list[float | None] = []
    """Per step, the loss summed over this rank's target tokens, as the backend returned it."""
    gradient_norms: list[float | None] = []
    """Per step, the global norm as this rank was told it."""
    fed: list[list[str]] = []
    """For each of the first steps, a digest of every sample that reached the model."""
    fed_sums: list[str | None] = []
    """Per step, the sum modulo 2^64 of a hash of every sample that reached the model."""
    computed_loss_sums: list[float | None] = []
    """Per step, the loss summed over this rank's target tokens as it was computed, whatever the backend
    returned; None: the backend computes it by itself, or it is not finite."""
    early_reduced_bytes: int | None = None
    """Counted steps: payload of reductions in backward passes that were not the last of their step; None:
    nothing was counted, or every step has one."""
    initial_digest: str | None = None
    final_digest: str | None = None
    probe_loss: float | None = None
    """Loss of one batch, equal on all ranks, after training: where it differs, so do the weights."""
    memory: list[MemoryPart]
    overlap: list[OverlapPart] = []
    probe_seconds: dict[str, float] = {}
    """What each probe cost by its own clock, seconds per step in which it ran."""
    timed_probes: list[str] = []
    """Probes that were at work in the timed steps; none should be."""
    matmul_flops_per_second: dict[str, float] = {}
    """By dtype, what matrix products alone reached before the training; where that was asked for."""
    reserved_bytes: int | None = None
    """CUDA: the most that the caching allocator reserved."""
    host_peak_bytes: int | None = None
    """The process's largest resident set, libraries included."""


class CommunicationPart(Part):
    """Collectives of one kind on one rank.

    Summed over the counted steps in the phases forward, backward and step; over the whole run in the
    phases setup, evaluation and checkpoint, and in digest, the gathering of the initial weights for
    their digest. A call that joins tensors of several dtypes is counted under each of them.
    """

    rank: int
    phase: str
    op: str
    dtype: str
    group: str
    group_ranks: list[int]
    group_size: int
    calls: int
    payload_bytes: int
    """Size of the whole tensors that these calls work on."""
    largest_bytes: int | None = None
    """The same of the largest call; None in records from before it was kept."""
    role: Literal["world", "shard", "replica"] = "world"
    """What the group is for: all ranks, those that share one copy of the weights, or those that hold
    the same shard."""


class ObservedPart(Part):
    """What the harness saw of a run without asking the backend; None: it could not see."""

    parameters_left_out: list[str] = []
    """Parameters of the model that no optimizer that trains was given."""
    optimizer_used: bool = False
    """Whether the optimizer that the job built is among those that train."""
    optimizer_steps: int | None = None
    optimizer_groups: list[dict[str, Any]] = []
    """Constants of each group of the optimizers that train, whoever built them, and the names of its
    parameters where they can be known."""
    master_dtypes: list[str] = []
    """Of the tensors that the optimizer updates."""
    optimizer_state_dtypes: list[str] = []
    tied_parameters: int | None = None
    frozen_parameters: list[str] = []
    attention: str | None = None
    activation_checkpointing: bool | None = None
    compiled: bool | None = None
    dropout: float | None = None
    """The largest probability in the live model."""
    tf32: bool | None = None
    deterministic: bool | None = None


class EvaluationPart(Part):
    """Loss on the held-out samples, over all ranks."""

    step: int
    """Number of optimizer steps taken before."""
    loss: float | None
    target_tokens: int
    samples: int | None = None
    """Over all ranks; None in records from before evaluations were timed."""
    seconds: float | None = None
    """The slowest rank's, from a synchronised device to a synchronised device."""


class WindowsPart(Part):
    """How many steps each window holds."""

    warmup: int
    counted: int
    timed: int
    traced: int = 0
    settling: int = 0
    """After counted and traced steps, in no statistic: what these leave behind makes them longer."""


class Record(Part):
    """One run, self-contained."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str
    created_at: str
    status: Status
    error: ErrorPart | None = None
    reasons: list[str] = []
    """Why the backend is unsupported here."""
    command: list[str]
    """The command line that asked for this run."""
    job: dict[str, Any]
    job_id: str
    cell: str
    """Key of job, backend, world, repeat, measurement and code: equal cells need not run again."""
    repeat: int
    measure: dict[str, Any] | None = None
    """The settings of measurement; None in records from before they were kept."""
    backend: BackendPart
    world: WorldPart
    environment: dict[str, Any]
    layout: LayoutPart | None = None
    model: dict[str, Any] | None = None
    """What was really built: architecture, attention kernel, parameters, tied tensors."""
    data: dict[str, Any] | None = None
    """Numbers of samples and target tokens."""
    initial_weights: WeightsPart | None = None
    final_weights: WeightsPart | None = None
    observed: ObservedPart | None = None
    steps: list[StepPart] = []
    ranks: list[RankPart] = []
    comm: list[CommunicationPart] = []
    eval: list[EvaluationPart] = []
    windows: WindowsPart | None = None
    skipped_steps: int = 0
    """Updates that a loss scaler skipped."""
    artifacts: dict[str, str] = Field(default_factory=dict)
    """Files beside the record, by what they are, relative to the record's folder."""
