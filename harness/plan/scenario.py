"""A job under one backend on some number of devices, or why there is none; the model of a job; which jobs
have predicted activations and speed (model states and traffic have closed forms for all)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from harness.backends import registry
from harness.backends.base import BackendOptions, Precision, Preset, World
from harness.backends.libraries.facts import runs_cpu_adam, unmet_cpu_adam
from harness.backends.mesh import Mesh
from harness.backends.model_source import AskedLoading
from harness.backends.optimizer.kinds import why_not_narrowed
from harness.backends.options import PipelineOptions, unmet_hybrid, unmet_second_copy, unmet_shards_on_host
from harness.backends.options import shard_size as shard_group
from harness.backends.pipeline.cut import PIPELINED_MODELS, not_whole, why_not_cut, why_not_scheduled
from harness.backends.refusals import Unsupported
from harness.backends.strategy import StrategyKind
from harness.backends.tensor import plan as tensor_plan
from harness.errors import HarnessError
from harness.forms.activations import ActivationProfile, blocks_between, recomputed_until
from harness.forms.families import model_states
from harness.forms.layout import Derivations, Layout, ceil_to, elements
from harness.forms.optimizers import OWN_STATES, implementation
from harness.forms.peak_memory.families import has_timeline, peak_rank
from harness.forms.terms import ModelStates
from harness.forms.workload import Workload
from harness.forms.zero12 import START_ALIGNMENT_ELEMENTS
from harness.job.job import DEFAULT_TASK, AdapterSection, Job, OptimizerSection, axes_of
from harness.job.pairs import why_refused as why_pair_refused
from harness.judge.wording import listed
from harness.launch.launcher import require_libraries
from harness.nested import put
from harness.plan.hardware import Device, Fabric, TimeConstants
from harness.plan.model import PlannedModel, heads_of, mixture_of_experts, why_refused, with_adapters
from harness.plan.models import ARCHITECTURES, from_config, load_model
from harness.record import DataPart, ModelPart
from harness.run_directory.request import RunRequest


@dataclass(frozen=True, kw_only=True)
class OtherCode:
    """What is done otherwise than by our job: here nothing, unless bounds are asked for. Those of programs
    behind published runs: `benchmarks/published/programs.py`."""

    update_copies: int | None = None
    """Copies of what an update works on at once, in the dtype of the masters; None: as AdamW makes."""
    frozen_keep: Literal["least", "most"] | None = None
    """What parameters that groups of the optimizer freeze keep of what trained ones do; None: not known."""
    emulates_fp8: bool = False
    """Layers of blocks hold their operands rounded and widened beside the job's own, while they multiply."""
    nested_scales: bool = True
    """Of packed weights; otherwise one in fp32 per 64 values."""
    packs_head: bool = False
    """The output projection is packed as the blocks' layers are."""
    unpacking_bytes: float | None = None
    """Read and written for each packed weight that is unpacked; None: packed once, and unpacked once."""

    @property
    def options(self) -> dict[str, Any]:
        """As closed forms take them, beside those of a backend."""
        return {} if self.update_copies is None else {"update_copies": self.update_copies}

    @property
    def computes_loss(self) -> bool:
        """Whether the model itself computes a loss of its own, before Accelerate widens its outputs."""
        return False

    def traced(self, scenario: Scenario) -> tuple[Mapping[str, Any], AdapterSection]:
        """The configuration and adapters with which transformers keeps what the program does."""
        return scenario.model.config, scenario.job.adapter

    def kept(self, profile: ActivationProfile, scenario: Scenario) -> ActivationProfile:
        """What is kept where transformers' model keeps `profile`."""
        return profile


@dataclass(frozen=True, kw_only=True)
class Scenario(Derivations):
    """All that decides memory, communication and speed."""

    model: PlannedModel
    job: Job
    """With its micro-batch and accumulation resolved (`harness.job.batch`)."""
    label: str
    """The backend with its options, canonical: 'zero3:offload=cpu'."""
    strategy: StrategyKind
    options: Mapping[str, Any] = field(default_factory=dict)
    world_size: int
    ranks_per_node: int
    shard_size: int | None = None
    preset: Preset = "like-for-like"
    loading: AskedLoading = "slices"
    """As `runtime.loading` asks for it; see `harness.plan.prediction`."""
    micro_batch_size: int
    accumulation_steps: int
    torch_device: str = "cuda"
    """'cuda' or 'cpu': decides kernels, defaults of the optimizer, and what lies on the host."""
    transport: str = "nccl"
    device: Device | None = None
    """None: not said; then nothing is judged to fit and no time is predicted."""
    fabric: Fabric | None = None
    constants: TimeConstants | None = None
    """Of the time model, by a calibration; None: published ones."""
    other: OtherCode = OtherCode()
    """What another program does otherwise."""

    @classmethod
    def of(
        cls,
        label: str,
        model: PlannedModel,
        job: Job,
        *,
        world_size: int,
        ranks_per_node: int,
        preset: Preset,
        torch_device: str = "cuda",
        **others: Any,
    ) -> Scenario | None:
        """The scenario of a job under a backend; None: a third party's, which no closed form knows.

        `preset`: of the job; an option of the label goes before it. `job`: with its global batch. `others`:
        the fields that do not follow from the label, such as the micro-batch.
        """
        entry, options = registry.parse(label)
        if entry.strategy is None:
            return None
        shards = 1 if entry.strategy.of_family.replicates_alone else None
        if entry.strategy.facts.has_replicas:
            world = World.planned(world_size, ranks_per_node, torch_device)
            shards = shard_group(world, getattr(options, "shard_size", None))
        return cls(
            model=model,
            job=job,
            label=label,
            strategy=entry.strategy,
            options=options.model_dump(mode="json"),
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            shard_size=shards,
            preset=options.preset or preset,
            torch_device=torch_device,
            transport="nccl" if torch_device == "cuda" else "gloo",
            **others,
        )

    @property
    def samples(self) -> int:
        """Samples per step of each rank, or group of ranks, that has its own."""
        return self.micro_batch_size * self.accumulation_steps

    @property
    def ranks_of_node(self) -> int:
        """Ranks on a full node."""
        return min(self.ranks_per_node, self.world_size)

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    @cached_property
    def mesh(self) -> Mesh:
        """The dimensions of the ranks."""
        return registry.mesh_of(self.label, self.world_size)

    @cached_property
    def peak_rank(self) -> int:
        """The rank with the largest model states."""
        return peak_rank(self._workload(0))

    @property
    def unlike_ranks(self) -> tuple[int, ...]:
        """The rank that holds most; of a pipeline one for each place, since activations decide there."""
        if not self.strategy.facts.cuts_layers:
            return (self.peak_rank,)
        return tuple(self.mesh.group("pipeline", 0))

    def workload(self, rank: int | None = None) -> Workload:
        """Workload of one rank, as closed forms take it; None: the rank that holds most."""
        rank = self.peak_rank if rank is None else rank
        return self.once(("workload", rank), lambda: self._workload(rank))

    @cached_property
    def states(self) -> ModelStates:
        """Model states of the rank that holds most."""
        return model_states(self.workload())

    @property
    def held_states(self) -> dict[str, int]:
        """Bytes of them by kind where that rank computes: on its device or, of CPU ranks, on the host."""
        return self.states.kinds(host=None if self.torch_device == "cpu" else False)

    def _workload(self, rank: int) -> Workload:
        training = self.job.training
        return Workload(
            layout=layout_of(self.model, self.job, self.other),
            strategy=self.strategy,
            world_size=self.world_size,
            mesh=self.mesh,
            rank=rank,
            shard_size=self.shard_size,
            ranks_per_node=self.ranks_per_node,
            precision=training.held_precision,
            preset=self.preset,
            micro_batch_size=self.micro_batch_size,
            accumulation_steps=self.accumulation_steps,
            sequence_length=self.job.data.sequence_length,
            gradient_clipping=training.gradient_clipping,
            activation_checkpointing=training.activation_checkpointing,
            recomputed_until=recomputed_until(self.model.architecture),
            device=self.torch_device,
            transport=self.transport,
            options={**self.options, **self.other.options},
            **self.job.optimizer.for_closed_forms(self.options),
        )


def layout_of(model: PlannedModel, job: Job, other: OtherCode = OtherCode()) -> Layout:
    """The model's tensors as a job builds and decays them: one for all scenarios that say so alike.

    Raises HarnessError as `with_adapters`, JobError for a group of the optimizer without any parameter.
    """
    config, kind = model.config, str(model.config.get("model_type"))
    said = (job.training.precision, job.adapter.model_dump_json(), job.optimizer.model_dump_json())
    known = (kind, heads_of(config), other.nested_scales, other.packs_head)

    def laid_out() -> Layout:
        layout = model.layout
        if layout.attention is None:
            layout = replace(layout, attention=heads_of(config))
        if job.training.precision == "bf16":
            layout = layout.in_dtype("bfloat16")
        layout = with_adapters(
            layout, job.adapter, kind, nested_scales=other.nested_scales, packs_head=other.packs_head
        )
        return _with_groups(layout, job.optimizer)

    return model.layout.once((*said, *known), laid_out)


M = TypeVar("M", bound=BaseModel)


def with_values(own: M, settings: Mapping[str, Any]) -> M | None:
    """A job or experiment with other settings; None: its own contradict them."""
    document = own.model_dump()
    for key, value in settings.items():
        put(document, tuple(key.split(".")), value)
    try:
        return type(own).model_validate(document) if settings else own
    except ValidationError:
        return None


def with_settings(scenario: Scenario, settings: Mapping[str, Any]) -> Scenario | None:
    """The scenario of another job; None: the job's own settings contradict it."""
    job = with_values(scenario.job, settings)
    return None if job is None else replace(scenario, job=job)


def _with_groups(layout: Layout, optimizer: OptimizerSection) -> Layout:
    """The optimizer's groups of the model, and what they freeze. Raises JobError for a group without any.

    Where gradients go through frozen modules only a traced step tells, which a layout has that was built.
    """
    frozen = optimizer.frozen_among([tensor.name for tensor in layout.parameters]) - layout.frozen
    if frozen:
        layout = replace(layout, frozen=layout.frozen | frozen, without_gradient=None)
    groups = optimizer.update_groups({tensor.name: len(tensor.shape) for tensor in layout.trained})
    own = tuple(group.names for group in groups) if optimizer.groups else ()
    return replace(layout, decaying=groups[0].names, groups=own)


def why_not_planned(
    label: str, job: Job, world: World, samples: int | None, model: PlannedModel | None = None
) -> str | None:
    """The first reason why a job cannot run under a built-in backend in a world; None: it can.

    samples: of a micro-step; None: the batch does not divide, and what it decides is not asked. model: None
    where it is not known before ranks start.
    """
    entry, options = registry.parse(label)
    assert entry.strategy is not None
    precision = job.training.held_precision
    reason = why_unsupported(entry.strategy, options, precision, world) or why_refused(job, entry.strategy)
    reason = reason or why_pair_refused(label, world.world_size, job)
    if reason is not None or samples is None:
        return reason
    reason = why_not_divided(options, model, world.world_size, samples, precision)
    is_8bit = job.optimizer.kind == "adamw-8bit" and entry.strategy.family == "zero12"
    if reason or model is None or not is_8bit:
        return reason
    # As a rank would say that has built its optimizer.
    groups, ranks = layout_of(model, job).update_groups(), world.world_size
    alignment = START_ALIGNMENT_ELEMENTS * ranks
    return why_not_narrowed(
        ([tensor.numel for tensor in group], ceil_to(elements(group), alignment) // ranks) for group in groups
    )


def why_unsupported(
    strategy: StrategyKind, options: BackendOptions, precision: Precision, world: World
) -> str | None:
    """The first reason why a job cannot run under a strategy; None: it can."""
    try:
        options.mesh(world.world_size)
    except Unsupported as misfit:
        return str(misfit)
    offload = getattr(options, "offload", "none") != "none"
    if strategy.family == "single" and world.world_size > 1:
        return f"one process only, not {world.world_size}"
    if strategy.facts.has_replicas:
        unmet = unmet_hybrid(world, getattr(options, "shard_size", None))
        if unmet:
            return unmet[0]
    if unmet := [*unmet_second_copy(world, options), *unmet_cpu_adam(options)]:
        return unmet[0]
    if strategy.zero_stage == 0 and offload:
        return "stage 0 has nothing to offload"
    if strategy.zero_stage == 0 and precision == "bf16":
        return "DeepSpeed always keeps fp32 masters at stage 0"
    if strategy.zero_stage is not None:
        needs_own = precision == "bf16" and offload and not runs_cpu_adam(options)
        why = "DeepSpeed offloads an optimizer without fp32 masters only if it is its own"
        return why if needs_own else None
    if world.device == "cpu" and strategy.through_accelerate and strategy.family != "ddp":
        return "accelerate ignores an FSDP plugin without an accelerator"
    if strategy.family == "fsdp1" and (unmet := unmet_shards_on_host(options)):
        return unmet[0]
    if world.device == "cpu" and strategy.family == "fsdp1" and offload:
        return "CPUOffload of FSDP1 needs an accelerator to offload from"
    if precision == "fp16-mixed" and offload and strategy.family == "fsdp2" and world.device == "cuda":
        return "torch's gradient scaler reduces its flag on the CPU, which NCCL cannot reach"
    return None


def why_not_divided(
    options: BackendOptions, model: PlannedModel | None, world_size: int, samples: int, precision: Precision
) -> str | None:
    """Why ranks cannot divide layers or blocks of a model, or a micro-step of so many samples; None: they
    can, or need not.

    model: None where it is not known yet. The world is one that the options fit.
    """
    mesh = options.mesh(world_size)
    if not isinstance(options, PipelineOptions):
        if model is None or mesh.size("tensor") == 1:
            return None
        shapes = {tensor.name: tensor.shape for tensor in model.layout.parameters}
        return tensor_plan.why_not_cut(shapes, model.config, mesh.size("tensor"))
    ranks, parts = mesh.size("pipeline"), options.parts(world_size)
    if model is not None:
        if precision == "fp16-mixed":
            return "torch's gradient scaler looks at the gradients of one stage only"
        kind = str(model.config.get("model_type"))
        if kind not in PIPELINED_MODELS:
            return f"stages are cut for models of type {', '.join(PIPELINED_MODELS)}, not {kind}"
        blocks, stages = len(model.layout.blocks), options.stages_on(ranks)
        if reason := why_not_cut(blocks=blocks, ranks=ranks, stages=stages):
            return reason
    reason = why_not_scheduled(options.schedule, micro_batches=parts, ranks=ranks)
    return reason or (not_whole(samples, parts) if samples % parts else None)


INT64_BYTES = 8
BYTES_VOCABULARY = 257
"""Of the tokenizer 'bytes': 256 values and the end of a text (`rank.data`; a test compares)."""


def job_model(job: Job, named: str | None = None, assignments: Sequence[str] = ()) -> PlannedModel:
    """The model that `--model` names, with `assignments` of its configuration, else the job's: by name as
    `load_model` finds it or of `model.config`.

    Of another task than causal-lm, where model or data come from a factory, where code of the model's folder
    may run, and where groups of the optimizer freeze parameters, it is built without weights, which imports
    torch and reads the job's data: they decide classes and vocabulary, and where gradients go. Raises
    HarnessError; a vocabulary that only a tokenizer knows must be given.
    """
    if named is not None:
        return load_model(named, assignments=assignments)
    own = job.model.factory or job.data.factory or job.model.trust_remote_code
    if job.task != DEFAULT_TASK or own or job.optimizer.freezes:
        require_libraries("plans of a job whose model or data must be built first")
        from harness.rank.job_check import model_facts  # loads torch and transformers

        return planned_model(model_facts(job), job)
    if job.model.name is not None:
        return load_model(job.model.name, by_known_type=False)  # as a run, which would need its code
    config = job.model.config_values()
    if "vocab_size" not in config:
        if job.data.tokenizer != "bytes":
            raise HarnessError(
                f"model.config needs vocab_size: only the tokenizer '{job.data.tokenizer}' knows it; "
                "or name a model with --model"
            )
        config["vocab_size"] = BYTES_VOCABULARY
    return from_config(config, name=str(config["model_type"]), source="model.config", given_whole=False)


def planned_model(facts: Mapping[str, Any], job: Job) -> PlannedModel:
    """The model of a job. `facts`: what the check of the job returned (`rank.job_check`)."""
    model, layout = ModelPart(**facts["model"]), TypeAdapter(Layout).validate_python(facts["layout"])
    config: dict[str, Any] = facts["configuration"]
    geometry = model.geometry
    return PlannedModel(
        name=job.model.name or str(config.get("model_type", model.architecture)),
        source=f"model.factory {job.model.factory}" if job.model.factory else "the configuration of the job",
        architecture=model.architecture,
        config=config,
        layout=layout,
        multiplying_parameters=geometry.multiplying_parameters if geometry else model.parameters,
        layers=geometry.layers if geometry else len(layout.blocks),
        attention_width=geometry.attention_width if geometry else 0,
        whole_because=model.whole_because,
    )


def data_bytes(facts: Mapping[str, Any], job: Job, torch_device: str) -> int:
    """Bytes that samples keep on the device of a rank: two int64 each and the epoch's order; 0 on GPUs.

    `rank.data`: lengths, targets and the permutation; tokens lie outside of the allocator.
    """
    if torch_device != "cpu":
        return 0
    data = DataPart(**facts["data"])
    numbers = 2 * data.samples + (data.training_samples if job.data.shuffle else 0)
    return INT64_BYTES * numbers


def scenario_of(cell: RunRequest, model: PlannedModel, *, device: Device | None = None) -> Scenario | None:
    """The scenario of a cell or of a prepared run; None for a third party's backend."""
    return Scenario.of(
        cell.backend, model, cell.job, world_size=cell.world_size, ranks_per_node=cell.ranks_per_node,
        preset=cell.preset, micro_batch_size=cell.micro_batch_size,
        accumulation_steps=cell.accumulation_steps, loading=cell.loading,
        torch_device=cell.device, device=device,
    )  # fmt: skip


PREDICTED = ("training.activation_checkpointing", "loss.chunk_tokens", "optimizer.groups")
"""Settings of `axes_of` that profiles of activations and the time model cover."""


ALL = "activations and speed {} are"
SPEED = "speed {} is"


def why_states_alone(
    model: PlannedModel, job: Job, *, covered: tuple[str, ...] = (), of: str = ALL
) -> str | None:
    """Why neither activations nor speed of a job are predicted; None: they are.

    covered: settings of `axes_of` that whoever asks takes into account. of: what is asked, ALL or SPEED.
    """
    own = [f"{name}.factory" for name in ("model", "data", "loss") if getattr(job, name).factory]
    architecture = ARCHITECTURES.get(str(model.config.get("model_type")))
    if job.task != DEFAULT_TASK:
        what = f"of task {job.task}"
    elif own:
        what = f"with {' and '.join(own)}"
    elif mixture_of_experts(model.config):
        what = f"of {model.architecture}, a mixture of experts,"
        return (
            f"activations and speed {what} follow from what its router does with the data and are not "
            "predicted; model states and traffic are"
        )
    elif architecture is not None and not architecture.causal:
        what = f"of {model.architecture}, which is not a causal language model,"
    else:
        if not (given := unpredicted_axes(job, covered)):
            return None
        if job.training.precision == "fp8":
            return EMULATED
        left = f"{of.format(f'under {listed(given)}')} not predicted; "
        return left + ("model states and traffic are" if job.optimizer.factory is None else OWN_STATES)
    return (
        f"activations and speed {what} are not predicted, only those of causal language models of "
        "transformers; model states and traffic are"
    )


CHECKPOINTING = "training.activation_checkpointing"
OPTIMIZER = "optimizer.kind"
FROZEN = "frozen optimizer.groups"
COMPILED = "model.compile"
"""Whose speed is predicted, by kernels that are fused, and whose memory is a range."""
MOST_COPIES = {"adam": 2, "sgd": 1, "adamw-8bit": 3, "adamw-8bit-bnb": 0}
"""The most that the update of other optimizers allocates, in copies of what it works on. Adam and SGD:
gradients with the decay added; Adam: the roots (torch 2.13, optim/adam.py and sgd.py, foreach; one by one the
quotient too). torchao 0.18: both moments in full and the root, which its compiled kernel may leave away.
bitsandbytes 0.50: one kernel in place."""
FEWEST_BLOCKS = 3
"""From which compiled blocks keep more together than one eager block computes again."""


def neighbours(scenario: Scenario) -> tuple[Scenario, Scenario] | None:
    """Predicted scenarios between which the memory of one that is not lies, the one that needs less first;
    None: they are not known.

    Compiled blocks keep their inputs at least, as eager ones do that compute all else again, and no more than
    eager ones keep: the compiler takes the cut with the fewest bytes (torch/_functorch/partitioners.py,
    `min_cut_rematerialization_partition`). Every n-th block keeps what all would, the others what none would.
    An optimizer other than AdamW has states in closed form; its update makes no copies, or `MOST_COPIES`.
    Frozen parameters keep for the backward pass what trained ones do at most, and at least what follows from
    where gradients go (`ActivationProfile.with_frozen`). Emulated fp8 keeps what fp32 does; while a layer
    multiplies, its operands lie there in fp8 too, and widened (torchao 0.18, float8_linear.py and
    float8_ops.py).
    """
    training, model, other = scenario.job.training, scenario.job.model, scenario.other
    found: Iterable[Scenario | None]
    less: dict[str, Any] = {CHECKPOINTING: True}
    if scenario.job.optimizer.freezes and other.frozen_keep is None:
        found = [replace(scenario, other=replace(other, frozen_keep=keep)) for keep in ("least", "most")]
    elif (copies := _most_copies(scenario)) is not None:
        found = [replace(scenario, other=replace(other, update_copies=count)) for count in (0, copies)]
    elif model.compile == "block" and not training.activation_checkpointing:
        if len(scenario.model.layout.blocks) < FEWEST_BLOCKS:
            return None
        plain = {"model.compile": "none"}
        found = with_settings(scenario, less | plain), with_settings(scenario, plain)
    elif training.precision == "fp8":
        wide = with_settings(scenario, {"training.precision": "fp32"})
        found = wide, wide and replace(wide, other=replace(wide.other, emulates_fp8=True))
    elif scenario.strategy.facts.cuts_layers and (blocks_between(training.activation_checkpointing) or 1) > 1:
        found = with_settings(scenario, less), with_settings(scenario, {CHECKPOINTING: False})
    else:
        return None
    low, high = found
    if low is None or high is None or why_memory_unknown(low) or why_memory_unknown(high):
        return None
    return low, high


def why_between(scenario: Scenario) -> str:
    """Why the peak of a scenario with `neighbours` is a range."""
    training, kind = scenario.job.training, scenario.job.optimizer.kind
    if scenario.job.optimizer.freezes:
        return "frozen layers keep at most what trained ones do, and at least nothing for their own gradients"
    if copies := _most_copies(scenario):
        return (
            f"the update of optimizer.kind={kind} copies what it works on up to {copies} times, or not at all"
        )
    if training.precision == "fp8":
        return "emulated fp8 keeps what fp32 does, and while a layer multiplies at most its operands rounded"
    if scenario.job.model.compile == "block":
        return "compiled blocks keep as much as eager blocks at most, and as blocks that recompute at least"
    return (
        f"with activation_checkpointing={training.activation_checkpointing} a stage keeps between what it "
        "would with true and with false"
    )


def _most_copies(scenario: Scenario) -> int | None:
    """Most copies of what the update works on; None: the optimizer is AdamW, or nothing is known of it."""
    optimizer = scenario.job.optimizer
    copies = None if scenario.other.update_copies is not None else MOST_COPIES.get(optimizer.kind)
    one_by_one = implementation(scenario.workload()) == "for-loop"
    return copies if copies is None or not (one_by_one and optimizer.kind == "adam") else copies + 2


def why_memory_unknown(scenario: Scenario) -> str | None:
    """Why the memory of a step is not predicted; None: it is."""
    other = scenario.other
    given = {OPTIMIZER: other.update_copies, FROZEN: other.frozen_keep}
    covered = tuple(name for name, value in given.items() if value is not None)
    return _without_timeline(scenario) or why_states_alone(scenario.model, scenario.job, covered=covered)


def _without_timeline(scenario: Scenario) -> str | None:
    workload = scenario.workload()
    every = blocks_between(workload.activation_checkpointing) or 1
    if every > 1 and scenario.strategy.facts.cuts_layers:
        return f"what stages keep with checkpointing of every {every} blocks is not predicted"
    if has_timeline(workload):
        return None
    return f"activations and speed under {scenario.label} are not predicted; model states and traffic are"


def require_speed(scenario: Scenario, *, covered: tuple[str, ...]) -> None:
    """Raise HarnessError for a job whose speed is not predicted. `covered`: settings that its model has."""
    if (reason := _without_timeline(scenario)) is not None:
        raise HarnessError(reason)
    asked = scenario.model, scenario.job
    if why_states_alone(*asked, covered=covered) is not None:
        of = SPEED if neighbours(scenario) else ALL
        raise HarnessError(str(why_states_alone(*asked, covered=covered, of=of)))


def unpredicted_axes(job: Job, covered: tuple[str, ...] = ()) -> list[str]:
    """Settings of a job that change what a step keeps and computes, and that no profile covers."""
    given = [text for text in axes_of(job) if text.partition("=")[0] not in (*PREDICTED, *covered)]
    return given + ([FROZEN] if job.optimizer.freezes and FROZEN not in covered else [])


EMULATED = (
    "fp8 products are emulated, so their speed is not that of fp8 hardware; model states and traffic are "
    "those of fp32"
)
