"""What ranks measured and devices are: parts of a record, and what every part is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, PositiveFloat, PositiveInt, StringConstraints
from pydantic.dataclasses import dataclass

from harness.files import Stored, added_later
from harness.forms.terms import OPERATIONS
from harness.nested import totals

HashSum = Annotated[str, StringConstraints(pattern="^[0-9a-f]{1,16}$")]
"""A sum of hashes modulo 2^64, hexadecimal."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""Of anything, or the number of a rank or step."""


class Part(Stored):
    """A part of a record: frozen; keys of a newer minor version are kept out by the schema version."""

    @classmethod
    def shared(cls, source: object) -> dict[str, Any]:
        """What an object has under the names of fields of this part; nothing of None."""
        return {name: getattr(source, name) for name in cls.model_fields if hasattr(source, name)}


class GitPart(Part):
    """The checkout that the harness ran from."""

    commit: str
    """Hash of the commit."""
    modified: bool
    """Whether the harness's packages differed from the commit."""
    changed: list[str] = []
    """Files of its packages that differ from the commit; older records do not name them."""


class InterfacePart(Part):
    """A network interface that is up."""

    name: str
    """The kernel's name, such as 'eth0'."""
    addresses: list[str]
    """Addresses of the interface."""
    megabits_per_second: int | None
    """None: the kernel does not know."""
    mtu_bytes: Count
    """Largest packet."""
    infiniband: bool
    """Whether it is an InfiniBand device."""


class NodePart(Part):
    """How the processors, GPUs and networks of one node are laid out."""

    host: str
    """Host name."""
    cpu: str
    """Model of the processor."""
    cores: int | None
    """Logical processors of the machine; None: not known."""
    usable_cores: int
    """Logical processors that the ranks may use."""
    memory_bytes: Count
    """Physical memory."""
    numa_nodes: int
    """Number of NUMA nodes."""
    gpus: list[str]
    """Names of the GPUs."""
    gpu_topology: list[str] | None
    """Lines of `nvidia-smi topo -m`; None without GPUs."""
    interfaces: list[InterfacePart]


class SlurmPart(Part):
    """The job of `harness slurm` that ran the cell; None where Slurm does not say."""

    job: str | None = None
    """Job id, with the index of an array."""
    nodes: str | None = None
    """As Slurm writes lists: node[1-2]."""
    partition: str | None = None
    """Partition of the job."""
    restarts: int | None = None
    """How often Slurm requeued the job."""
    attempts: int | None = None
    """How often the run was started."""
    step_exit_code: int | None = None
    """Of the step that ran the launchers; None: the script did not note it."""
    state: str | None = None
    """As Slurm names it; None until it was asked."""
    reason: str | None = None
    """Slurm's reason for the state."""
    exit_code: int | None = None
    """Of the batch script; negative: killed by that signal."""
    elapsed_seconds: int | None = None
    """Wall time of the job."""
    energy_joules: int | None = None
    """Energy, if Slurm's accounting has it."""
    max_resident_bytes: Count | None = None
    """The largest process of the job."""


class FabricPart(Part):
    """What a self-test of the network measured before the run; None: not measured."""

    created_at: str
    """Time of the measurement, UTC, ISO 8601."""
    transport: str
    """'gloo' or 'nccl'."""
    interface: str | None
    """Network interface that the transport was told to use; None: its own choice."""
    world_size: int
    """Ranks that took part."""
    nodes: int
    """Machines that they ran on."""
    all_reduce_bytes: Count | None
    """Size of the largest tensor that was reduced; None: all-reduce was not measured."""
    all_reduce_bus_bytes_per_second: float | None
    """Bus bandwidth at that size, as nccl-tests defines it."""
    all_reduce_latency_seconds: float | None
    """Time of the smallest all-reduce."""


class AcceleratorPart(Part):
    """Driver and libraries of the GPUs, as a rank finds them."""

    driver: str | None
    """Release of the kernel's driver, such as '580.65.06'; None: not known."""
    driver_cuda: str | None = None
    """Newest CUDA that the driver takes, such as '13.0'; None: not known, or AMD's."""
    cuda: str | None
    """CUDA that torch was built for; None: it was built for ROCm."""
    hip: str | None = None
    """HIP that torch was built for; None: it was built for CUDA."""
    nccl: str | None
    """NCCL, or RCCL, that is loaded."""
    cudnn: str | None
    """cuDNN, or MIOpen, that is loaded."""
    float32_matmul: str | None = None
    """How torch computes fp32 matrix products: 'highest' (fp32), 'high' (TF32 or bf16x3), 'medium' (bf16)."""
    cudnn_tf32: bool | None = None
    """Whether cuDNN may use TF32."""


class EnvironmentPart(Part):
    """Of several nodes, the first one's."""

    python: str
    """Version of Python."""
    platform: str
    """Operating system and C library."""
    cpu: str
    """Model of the processor."""
    cores: int | None
    """Logical processors of the machine; None: not known."""
    started_at: str | None = None
    """When a scheduler began the run, in UTC; None: at `created_at`, or the record is older."""
    load_average: float | None = None
    """Runnable processes over the last minute before the run; None in older records."""
    memory_bytes: Count
    """Physical memory."""
    gpus: list[str]
    """Names of the GPUs."""
    accelerator: AcceleratorPart | None = None
    """None on the CPU, in older records, and of runs that ended before they trained."""
    packages: dict[str, str]
    """Versions of the libraries."""
    code: str
    """Digest of the sources that run inside a cell."""
    code_changed: bool = added_later(False)
    """Whether those sources were others when the run had ended: it may mix both."""
    git: GitPart | None = None
    """None outside of a checkout."""
    variables: dict[str, str]
    """Those of an allow-list that were set, and all of NCCL and of torch's use of it."""
    launcher_settings: dict[str, str] = {}
    """Variables of `accelerate launch` by name: its configuration, which the ranks drop."""
    nodes: list[NodePart] = []
    """Of runs that a launcher of several nodes started."""
    slurm: SlurmPart | None = None
    fabric: FabricPart | None = None
    broken_event_lines: int = 0
    """Lines of the ranks' events that could not be read."""


Moment = Literal[
    "after_setup",
    "after_forward",
    "after_backward",
    "after_step",
    "during_evaluation",
    "during_checkpoint",
    "during_checkpoint_load",
]


class MemoryPart(Part):
    """Memory of one rank at one moment of a probed step."""

    step: Count
    """Number of the probed step."""
    moment: Moment
    """When it was read."""
    allocated_bytes: Count | None
    """What torch's allocator serves now."""
    peak_bytes: Count | None
    """The most it served since the moment before."""
    kinds: dict[str, int] | None
    """Live bytes by kind, each storage once; None: the backend does not say. 'activations': what the
    forward pass left behind; 'data': the samples in memory; 'other': the allocator's rest."""
    outside_kinds: dict[str, int] | None = None
    """Live bytes by kind that the allocator above did not serve: on the host beside a CUDA device, mapped
    from a file, or allocated before counting began. Not in `kinds`."""
    file_bytes: Count | None = None
    """Size of the files into which a rank's states were swapped; only in records of earlier versions."""
    gathered_peak_bytes: Count | None = None
    """Most gathered weights at the end of a module's forward pass since the moment before."""
    gathered_least_bytes: Count | None = None
    """Least gathered weights at such an end: what is gathered whatever computes."""
    active_bytes: Count | None = None
    """CUDA: what is served, and what was freed while another stream may still use it."""
    active_peak_bytes: Count | None = None
    """The most of it since the moment before."""
    reserved_bytes: Count | None = None
    """CUDA: what the caching allocator holds of the device; above `active_bytes` it is fragmentation."""
    reserved_peak_bytes: Count | None = None
    """The most of it since the moment before."""
    num_alloc_retries: Count | None = None
    """CUDA: how often the caching allocator so far found no free block, emptied its cache and tried again;
    each of these stops the device."""
    device_used_bytes: Count | None = None
    """CUDA: the device's memory in use as the driver counts it, context and NCCL included."""
    device_used_of: Literal["process", "device"] | None = None
    """CUDA: whose memory that is: this process's (NVML), or, where the driver cannot tell processes apart,
    as in containers, that of all programs on the device."""
    device_used_unknown: str | None = None
    """CUDA: why it is not this process's."""
    host_resident_bytes: Count | None = None
    """Resident set of the process, libraries included."""
    pinned_bytes: Count | None = None
    """CUDA: page-locked host memory that torch allocated."""

    def all_kinds(self) -> dict[str, int]:
        """Bytes by kind on the device and outside of its allocator together."""
        return totals([*(self.kinds or {}).items(), *(self.outside_kinds or {}).items()])


class PlacementPart(Part):
    """Where a rank may run on its machine."""

    processors: str
    """Logical processors of its affinity mask, as the kernel writes them: '0-15,64-79'."""
    processor_count: Count
    """How many these are."""
    numa_nodes: list[int]
    """NUMA nodes of these processors; empty: not told."""
    device_numa_node: int | None = None
    """NUMA node of its GPU; None: no GPU, or not told."""


class SetupMemoryPart(Part):
    """Host memory of one rank while it is set up: resident and backed by no file, libraries included."""

    before_bytes: Count
    """Before the model is built."""
    engine_peak_bytes: Count
    """Most until the engine is ready: the model built, sharded and filled with its initial weights."""
    engine_bytes: Count
    """When it is ready."""
    digest_peak_bytes: Count
    """Most while the initial weights are gathered and digested."""


class EnergyPart(Part):
    """From the first timed step to the end of the training; joules, not rounded."""

    seconds: float
    """How long that is."""
    device_joules: float | None = None
    """Energy of the rank's GPU by the driver's counter; None: no GPU, or see `device_unknown`."""
    device_unknown: str | None = None
    """Why the GPU's energy is not known; None: it is, or there is no GPU."""
    device_sampled_watts: float | None = None
    """Mean of the power samples that the driver kept of that time, independent of its counter; None: none."""
    device_limit_watts: float | None = None
    """Power limit in force on the GPU; None: not told."""
    host_joules: float | None = None
    """Of the rank's machine by RAPL, in older records."""
    host_unknown: str | None = None
    """Why it is not known, in older records."""
    boot: str | None = None
    """Equal for ranks on one machine, in older records."""


SavedFormat = Literal["native", "consolidated", "neutral"]


class CheckpointPart(Part):
    """Saving or loading one checkpoint, on one rank."""

    operation: Literal["save", "load"]
    """Which of the two."""
    format: SavedFormat
    """The library's own, the weights as Hugging Face reads them, or weights and optimizer states by name."""
    step: Count
    """Steps taken before."""
    seconds: float
    """From a barrier to a barrier: that of the slowest rank."""
    file_bytes: Count | None = None
    """Size of all files of the checkpoint; of rank 0 only."""
    host_before_bytes: Count | None = None
    """Anonymous memory of the process before, libraries' files and mapped ones left out; None: not told."""
    host_peak_bytes: Count | None = None
    """The most meanwhile, read every few milliseconds."""


class ResumedPart(Part):
    """The checkpoint that a run continued."""

    format: SavedFormat
    """As of `CheckpointPart`."""
    run_id: str
    """The run that saved it."""
    backend: str
    """That run's backend, with its options."""
    world_size: int
    """That run's ranks."""
    step: Count
    """Steps taken when it was saved: the number of the first step of this run."""
    updates: int | None = None
    """Updates that the optimizer had made; None: the backend does not report them."""
    weights_digest: str | None = None
    """Digest of the master weights when it was saved; None: not taken."""


class WaitPart(Part):
    """A stretch of a traced step in which a rank waited for communication."""

    name: str
    """The collective that was waited for."""
    phase: str
    """Phase of the step."""
    seconds: float
    """Length of the stretch."""


class OverlapPart(Part):
    """How one traced step of one rank divides, from the profiler.

    Computing, exposed communication and idling add up to the step; on a device copies that run alone are the
    rest of it.
    """

    step: Count
    """Number of the step."""
    seconds: float
    """Length of the step."""
    compute_seconds: float
    """Computing, whether or not communication runs beside it."""
    communication_seconds: float
    """Communicating, whether or not computation runs beside it."""
    exposed_seconds: float
    """Communicating while nothing computes."""
    copy_seconds: float | None = None
    """Copies and memsets of a device, whatever runs beside them; None: of the CPU, or an older record, where
    they count as computing."""
    idle_seconds: float
    """None of these."""
    asleep_seconds: float | None = None
    """CPU: at least so long the rank's thread neither ran nor waited for a processor or for communication;
    None: not told, or an older record."""
    waits: list[WaitPart] = []
    """The ten longest, longest first."""


class ProcessorPart(Part):
    """Who used the processors of a rank's machine, from its first timed step to the end of the training."""

    seconds: PositiveFloat
    """How long that is."""
    process_seconds: float
    """Processor time of the rank's process, all threads together."""
    waiting_seconds: float
    """Its threads could have run and waited for a processor, all threads together."""
    machine_busy_seconds: float
    """All processors of the machine together: running any program."""
    machine_stolen_seconds: float
    """The same: taken by the hypervisor while a program could have run."""
    boot: str | None
    """Equal for ranks on one machine, whatever containers they run in; None: not told."""


OddUpdate = Literal[
    "stood-still", "begun-anew", "moments-lost", "first-moments-lost", "moments", "weights", "beta1", "beta2",
    "betas", "decay", "factor", "eps", "eps-in-root", "nesterov", "bias-uncorrected", "first-uncorrected",
    "second-uncorrected", "moments-rounded", "weights-rounded",
]  # fmt: skip
"""What an update did that Adam does not: see `update-altered` in `judge/findings.toml`."""


class OddUpdatePart(Part):
    """The first update of a rank that is not what Adam makes of gradient, moments and constants in force."""

    step: Count
    """Number of its step."""
    kind: OddUpdate
    """What it did instead, as far as weights and moments show it."""
    given: float | None = None
    """The constant, count, or number of bits that they show; None: the kind has none."""
    due: float | None = None
    """The same as it is in force."""
    parameters: list[str] = []
    """Parameters of the elements that show it; []: all do, or the backend does not list its pieces."""
    later: list[int] = added_later([])
    """Numbers of the first later steps whose updates are something else, too."""


class ReadyRank(Part):
    """A rank that is ready to train."""

    rank: Count
    """Global rank."""
    host: str
    """Host name of its machine."""
    device_name: str
    """Name of its GPU or processor."""
    placement: PlacementPart | None = None
    """Where it may run; None: the system does not tell, or an older record."""
    setup_seconds: float
    """From the start of the rank to its first step."""
    setup_memory: SetupMemoryPart | None = None
    """Host memory until then; None: the system does not tell, or an older record."""
    matmul_flops_per_second: dict[str, float] = {}
    """By dtype, what matrix products alone reached before the training; where that was asked for."""
    random_state: str | None = None
    """Digest of the state of torch's generator of random numbers before the first step, on a GPU of that
    device's too: what dropout draws follows from it. None: an older record, or an observed script."""


class ProbedRank(Part):
    """What was probed on a rank."""

    memory: list[MemoryPart]
    early_reduced_bytes: Count | None = None
    """Probed steps: payload of reductions in backward passes that were not the last of their step; None:
    nothing was counted, or every step has one."""
    overlap: list[OverlapPart] = []
    overlap_missing: str | None = None
    """Why steps were traced and `overlap` is empty."""
    probe_seconds: dict[str, float] = {}
    """What each probe cost by its own clock, seconds per step in which it ran."""
    timed_probes: list[str] = []
    """Probes that were at work in the timed steps; none should be."""
    reserved_bytes: Count | None = None
    """CUDA: the most that the caching allocator reserved."""
    num_alloc_retries: Count | None = None
    """CUDA: the same count as of `memory`, at the end of the training."""
    host_peak_bytes: Count | None = None
    """The process's largest resident set, libraries included."""
    processors: ProcessorPart | None = None
    """None: no step was timed, the system keeps no such accounts, or an older record."""
    energy: EnergyPart | None = None
    """None: no step was timed, or an older record."""
    figures: dict[str, float | None] = added_later({})
    """Further figures by name, with the unit in it; `judge/facts.py` has an entry for each that is shown."""


class EndedRank(Part):
    """A rank after the training."""

    audited_updates: Count | None = None
    """Updates of Adam that were computed again from samples of weights and moments at the ends of steps;
    None: another optimizer, or an older record."""
    odd_update: OddUpdatePart | None = None
    """The first of them that came out otherwise; None: none did."""
    probe_loss: float | None = None
    """Loss of one batch, equal on all ranks, after training: where it differs, so do the weights."""


@dataclass(frozen=True)
class PerStep:
    """Marks a list with a value per step, taken from a field of the rank's step events."""

    field: str
    known: bool = False
    """Whether the list is empty where a step has no value."""


class RankPart(EndedRank, ProbedRank, ReadyRank):
    """What one rank measured: what it wrote, and its steps as columns."""

    step_seconds: Annotated[list[float], PerStep("seconds")]
    """Duration of each step."""
    data_seconds: Annotated[list[float], PerStep("data_seconds")]
    """The part of each step spent on fetching the batch."""
    phase_seconds: dict[str, list[float]] = {}
    """Per step: 'forward', 'backward' and 'step' (clipping and update), each summed over micro-steps; of a
    pipeline also 'waiting', for other stages."""
    sample_hashes: Annotated[list[HashSum], PerStep("sample_hashes", known=True)]
    """Per step, the hash sum over this rank's samples."""
    samples: Annotated[list[Count], PerStep("samples", known=True)]
    """Per step, samples of this rank."""
    target_tokens: Annotated[list[Count], PerStep("target_tokens", known=True)] = []
    """Per step, tokens whose prediction counts in the loss."""
    loss_sums: Annotated[list[float | None], PerStep("loss_sum")] = []
    """Per step, the loss summed over this rank's target tokens, as the backend returned it."""
    gradient_norms: Annotated[list[float | None], PerStep("gradient_norm")] = []
    """Per step, the global norm as this rank was told it."""
    batch_digests: list[list[str]] = []
    """For each of the first steps, a digest of every sample that reached the model."""
    batch_hash_sums: Annotated[list[HashSum | None], PerStep("batch_hash_sum")] = []
    """Per step, the sum modulo 2^64 of a hash of every sample that reached the model."""
    computed_loss_sums: Annotated[list[float | None], PerStep("computed_loss_sum")] = []
    """Per step, the loss summed over this rank's target tokens as it was computed, whatever the backend
    returned; None: the backend computes it by itself, or it is not finite."""
    loss_gradients: Annotated[list[list[float] | None], PerStep("loss_gradients")] = []
    """Per step, the least and the most gradient that reached this rank's computed losses: how often an engine
    takes each. None: not known; []: those of the step before."""
    loss_factors: Annotated[list[list[float] | None], PerStep("loss_factors")] = []
    """Per step of an observed script, how often backward() took the loss of a micro-step, least and most;
    None: not known."""
    without_gradient: dict[int, list[str] | None] = {}
    """Trained parameters that got no gradient from this rank's samples, by the first step of which that
    holds; None: not known from there on; {}: not looked at, as in compiled models. In older records modules
    with weights of their own, of the first two steps."""
    passes: dict[int, tuple[int, int] | None] = {}
    """Calls of the model and backward passes of the loss, by the first step of which they hold; None: not
    known from there on, as in compiled models; {}: not counted."""
    otherwise: dict[str, list[Any]] = {}
    """What this rank has otherwise than rank 0 and all ranks should have alike, such as the learning rate of
    a step or a constant of the optimizer: its value and rank 0's."""
    initial_digest: str | None = None
    """Digest of the weights before the first step, as this rank gathered them; None: not taken."""
    final_digest: str | None = None
    """The same after the last step."""
    step_allocated_bytes: Annotated[list[Count | None], PerStep("allocated_bytes")] = []
    """Per step, what torch's allocator serves at its end; None: a probed step, whose moments are in `memory`,
    or nothing counted. On the CPU after the probed steps as the C library rounds blocks."""
    step_peak_bytes: Annotated[list[Count | None], PerStep("peak_bytes")] = []
    """The same: the most that it served in the step."""
    checkpoints: list[CheckpointPart] = []
    step_figures: dict[str, list[float | None]] = added_later({})
    """`figures` of each step; None: a step without it."""


def _known(op: str) -> str:
    if op not in OPERATIONS:
        raise ValueError(f"is not a collective that is counted: {', '.join(sorted(OPERATIONS))}")
    return op


class CommunicationPart(Part):
    """Collectives of one kind on one rank.

    Summed over the probed steps in the phases forward, backward and step, and of observed scripts 'between',
    which is everything between the update and the next forward pass, and what models send that do not train;
    over the whole run in the
    phases setup, evaluation, checkpoint and checkpoint_load, and in digest, the gathering of the
    initial weights for their digest. A call that joins tensors of several dtypes is counted under each
    of them.
    """

    rank: Count
    """Global rank."""
    phase: str
    """Phase of the run: 'setup', 'digest', 'forward', 'backward', 'step', 'evaluation', 'checkpoint' or
    'checkpoint_load'."""
    op: Annotated[str, AfterValidator(_known)]
    """Operation, such as 'all_reduce'."""
    dtype: str
    """Dtype of the tensors; 'none': a call without a tensor."""
    group: str
    """Name of the process group."""
    group_ranks: list[Count]
    """Global ranks of the group."""
    group_size: PositiveInt
    """Number of its ranks."""
    calls: Count
    """Number of calls."""
    payload_bytes: Count
    """Size of the whole tensors that these calls work on."""
    largest_bytes: Count | None = None
    """Size of the tensor of the largest call; None in older records."""
    of_job: bool = added_later(False)
    """Whether code of the job's own, its loss or its model, made the calls: no backend is held to them."""
    by: str = added_later("")
    """Of the phase 'between': the module whose code made the calls, or the class of a model that does not
    train, with that remark."""
    role: str = "world"
    """What the group is for: 'world', all ranks; 'shard', those that share one copy of the weights;
    'replica', those that hold the same shard. Where ranks share samples: the dimensions of the mesh along
    which the group lies, such as 'tensor' or 'data+sequence', 'alone', or 'other'."""


Window = Literal["warmup", "probed", "traced", "cooldown", "timed"]


# Not a model: a report may hold millions of steps, and with slots one takes a quarter of the memory.
@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class StepPart:
    """One optimizer step over all ranks."""

    step: Count
    """Number of the optimizer step, from 0."""
    window: Window
    """What the step is for: see the settings of `measure`."""
    loss: float | None
    """Mean cross entropy per target token of the global batch, in nats; None: not finite. Of an observed
    script see `observation.loss`."""
    gradient_norm: float | None
    """Global L2 norm before clipping; None: not finite, so a loss scaler skipped the update, or of an
    observed script that does not compute it."""
    learning_rate: float
    """As the job has it; of an observed script as its optimizer holds it."""
    applied_learning_rate: float | None = None
    """As the optimizer holds it after the step, of all ranks and groups the one farthest from the job's;
    None: no torch optimizer trains."""
    applied_gradient_norm: float | None = None
    """Norm of the gradients that the optimizer was given, after clipping, over all ranks; of the first
    steps only. None: not looked at, or no torch optimizer stepped."""
    tokens: Count | None
    """Tokens that are not padding, over all ranks; None: not known of an observed script."""
    target_tokens: Count | None
    """Tokens whose prediction counts in the loss, over all ranks; None: not known of an observed script."""
    samples: Count | None
    """Samples of the global batch; None: not known of an observed script."""
    seconds: Annotated[float, Field(ge=0)]
    """The slowest rank's."""
    sample_hashes: HashSum | None
    """Sum modulo 2^64 of a hash of each sample consumed, over all ranks: equal for equal samples; None: not
    known of an observed script."""


class EvaluationPart(Part):
    """Loss on the held-out samples, over all ranks."""

    step: Count
    """Number of optimizer steps taken before."""
    loss: float | None
    """Mean cross entropy per target token, in nats; None: not finite."""
    target_tokens: Count
    """Tokens whose prediction counts in the loss."""
    samples: Count | None = None
    """Over all ranks; None in records from before evaluations were timed."""
    seconds: float | None = None
    """The slowest rank's, from a synchronised device to a synchronised device."""


class WindowsPart(Part):
    """How many steps each window holds."""

    warmup: Count
    """First steps, excluded from all statistics."""
    probed: Count
    """Steps whose memory and communication are recorded, not timed."""
    timed: Count
    """Steps behind every figure of speed."""
    traced: Count = 0
    """Steps under torch's profiler, not timed."""
    cooldown: Count = 0
    """After probed and traced steps, in no statistic: the probes' side effects make them longer."""


class TurnsPart(Part):
    """Timed steps taken in turns with other cells of the round, whose ranks waited meanwhile."""

    steps: int
    """Timed steps of a turn; the last may have fewer."""
    places: list[int]
    """Of each turn, its place among the turns of all these cells, from 0."""
    beside: list[str]
    """Run ids of the other cells."""
    waited_seconds: float
    """How long rank 0 waited for its turns."""
    waited_process_seconds: float
    """Processor time that a rank took meanwhile, all threads together; of the ranks the most."""


class AnswerPart(Part):
    """One generated answer and its scores against the nearest of the right ones."""

    sample: int
    """Number of the held-out sample."""
    text: str
    """What was generated, up to the end of the text."""
    exact_match: bool
    """Whether it equals a right answer after SQuAD's normalisation."""
    f1: float
    """Harmonic mean of precision and recall of its words, from 0 to 1."""


class AnswersPart(Part):
    """All of them, over all ranks."""

    exact_match: float
    """Answers that match exactly, in percent."""
    f1: float
    """Mean F1, in percent."""
    seconds: float
    """The slowest rank's."""
    given: list[AnswerPart]
    """In the order of the samples."""
