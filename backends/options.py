"""Options of the built-in backends. Importable without torch, so that a typing error costs no start-up."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from harness.backends.base import BackendOptions, Preset, World
from harness.backends.libraries.facts import extensions, fact, offloads
from harness.backends.mesh import SECOND_COPY, Mesh
from harness.backends.refusals import Unsupported

Rotation = Literal["all-gather", "all-to-all"]
LowDtype = Literal["fp32", "bf16", "fp16"]
"""As DeepSpeed's configuration spells dtypes."""

COST_ALONE = frozenset(
    {
        "reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients",
        "use_multi_rank_bucket_allreduce", "stage3_max_live_parameters", "stage3_prefetch_bucket_size",
        "stage3_max_reuse_distance", "stage3_param_persistence_threshold", "leaf_module",
        "memory_efficient_linear", "forward_prefetch", "backward_prefetch", "limit_all_gathers", "prefetch",
        "find_unused_parameters", "static_graph", "sync_each_batch",
    }
)  # fmt: skip
"""Options that decide when and how bytes move: losses may change with them by the order of sums only."""


class NoOptions(BackendOptions):
    """This backend has no options of its own."""


class ReductionOptions(BackendOptions):
    """When gradients of micro-steps are reduced."""

    sync_each_batch: bool = Field(
        False,
        description="true: reduce gradients in every micro-step, not in the last one alone (Accelerate's "
        "sync_each_batch): FSDP then adds up shards of them, not whole gradients",
    )


class DdpOptions(ReductionOptions):
    """Arguments of DistributedDataParallel for models that do not use every parameter in every step."""

    find_unused_parameters: bool = Field(
        False,
        description="true: search the graph of each step for parameters that the loss does not use, which "
        "otherwise fails from the second step on; costs the search and an all-reduce of a map",
    )
    static_graph: bool = Field(
        False, description="true: assume that every step uses the parameters of the first, without a search"
    )


class SingleOptions(BackendOptions):
    """One process. Its options repeat the reference in another way, to measure what differs by that alone."""

    micro_batch_size: PositiveInt | None = Field(
        None, description="samples per forward pass instead of the job's: the same sums in another order"
    )
    precision: Literal["fp64", "fp32", "cast"] | None = Field(
        None,
        description="fp64 computes in double precision from the same initial weights. At a mixed precision, "
        "instead of autocast: fp32 computes in fp32, cast with low-precision copies of the weights, as ZeRO "
        "and FSDP do",
    )
    norm: Literal["fp32"] | None = Field(
        None,
        description="fp32: the gradient norm added in fp32 by tensor, as torch.nn.utils.clip_grad_norm_ "
        "does, instead of in fp64",
    )
    states: Literal["fp32"] | None = Field(
        None,
        description="fp32: AdamW with states of full width in place of an optimizer of fewer bits; Muon "
        "that orthogonalises in fp32",
    )
    backward: Literal["reordered"] | None = Field(
        None,
        description="reordered: gradients that reach a tensor from several modules are added in another "
        "order, as under the hooks of ZeRO-3",
    )
    partial_sums: int | None = Field(
        None,
        ge=2,
        description="number of rounded parts that are added up wherever tensor parallelism adds up what its "
        "ranks computed; Llama-like models",
    )

    @field_validator("preset")
    @classmethod
    def _no_preset(cls, value: Preset | None) -> Preset | None:
        if value is not None:
            raise ValueError("no preset changes the reference; remove it")
        return value


class ShardedOptions(ReductionOptions):
    """FSDP without replicas."""

    offload: Literal["none", "cpu"] = Field(
        "none", description="cpu: weights, gradients and optimizer states live in host memory"
    )


class AccelerateFsdpOptions(ShardedOptions):
    """FSDP as Accelerate sets it up."""

    cpu_ram_efficient_loading: bool = Field(
        False,
        description="true: only rank 0 holds the initial weights and broadcasts them; false: every rank "
        "builds the whole model, as Accelerate does by default",
    )


class HybridOptions(ShardedOptions):
    """FSDP that shards within groups of ranks and replicates across them."""

    shard_size: PositiveInt | None = Field(
        None, description="ranks in one shard group; default: the ranks of a node, or half of one node"
    )


class Fsdp1Options(ShardedOptions):
    """FSDP1's own settings of when weights are gathered; what is left out stays as torch has it."""

    auto_wrap: Literal["none"] | None = Field(
        None,
        description="none: no wrap policy, so that the whole model is one unit (for experiments); default: a "
        "unit per transformer block",
    )
    forward_prefetch: bool | None = Field(
        None, description="gather the next unit before this one computes, in the forward pass"
    )
    backward_prefetch: Literal["pre", "post", "none"] | None = Field(
        None,
        description="gather the next unit of the backward pass before (pre) or after (post) this one "
        "computes its gradients, or not ahead of it",
    )
    limit_all_gathers: bool | None = Field(
        None, description="the host waits, so that at most two units are gathered ahead"
    )


class Fsdp1HybridOptions(HybridOptions, Fsdp1Options):
    """FSDP1 within groups of ranks."""


class Fsdp2Options(ShardedOptions):
    """FSDP2's own setting of when weights are gathered."""

    prefetch: PositiveInt | None = Field(
        None,
        description="blocks gathered ahead explicitly, forward and backward; default: torch's implicit "
        "prefetch",
    )
    master_dtype: Literal["fp32", "compute"] = Field(
        "fp32",
        description="compute: weights and optimizer states in the compute dtype of a mixed precision, with "
        "no fp32 masters (for experiments)",
    )


class Fsdp2FullShardOptions(Fsdp2Options):
    """FSDP2 that frees weights after the forward pass."""

    reshard: int | None = Field(
        None,
        ge=2,
        description="ranks of a group that keeps the weights between them after the forward pass and gathers "
        "them within the group for the backward pass (reshard_after_forward as a number)",
    )


class Fsdp2HybridOptions(HybridOptions, Fsdp2Options):
    """FSDP2 within groups of ranks."""


NO_FILES = (
    "offload to files (NVMe, ZeRO-Infinity) is not supported: with DeepSpeed's default buffers it keeps as "
    "much host memory as it frees; use offload=optimizer or offload=cpu"
)


class ZeroOptions(BackendOptions):
    """DeepSpeed ZeRO. Sizes are in elements, as in DeepSpeed's own configuration."""

    offload: Literal["none", "optimizer", "cpu"] = Field(
        "none", description="optimizer: its states live in host memory; cpu: at stage 3 the weights too"
    )
    adam: Literal["deepspeed"] | None = Field(
        None,
        description="deepspeed: DeepSpeedCPUAdam, compiled on first use, updates the offloaded states; "
        "default: the job's AdamW",
    )
    reduce_bucket_size: PositiveInt | None = Field(
        None, description="gradient elements reduced at once; default: by the preset"
    )
    allgather_bucket_size: PositiveInt | None = Field(
        None, description="weight elements gathered at once (stages 1 and 2); default: by the preset"
    )
    overlap_comm: bool | None = Field(
        None,
        description="reduce gradients during the backward pass, with a second bucket; default: at stage 3",
    )
    contiguous_gradients: bool | None = Field(
        None,
        description="copy gradients into one buffer as they are produced; default: true, as in DeepSpeed",
    )
    communication_data_type: LowDtype | None = Field(
        None, description="dtype in which gradients cross the wire; default: by the preset"
    )
    grad_accum_dtype: LowDtype | None = Field(
        None, description="dtype in which gradients of micro-steps add up; default: by the preset"
    )
    gradient_clipping: float | None = Field(
        None, ge=0, description="overrides the job's clipping for this backend only; 0: off (for experiments)"
    )
    default_clipping: bool = Field(
        False,
        description="leaves the clipping key out of DeepSpeed's configuration (for experiments): DeepSpeed "
        f"{fact('zero-clips-by-default').first} and later then clip at 1.0 whatever the job says",
    )

    @field_validator("offload", mode="before")
    @classmethod
    def _no_files(cls, value: object) -> object:
        if value in ("nvme", "nvme-all"):
            raise ValueError(NO_FILES)
        return value

    def extensions(self) -> tuple[str, ...]:
        return extensions(self)


class Zero12Options(ZeroOptions):
    """Stages 1 and 2's own setting of how gradients are reduced."""

    use_multi_rank_bucket_allreduce: bool | None = Field(
        None,
        description="false: each part of the gradients is reduced to the rank that keeps it, half the bytes "
        "of the all-reduce of all of them in more calls",
    )


SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed 0.19.8, `runtime/zero/config.py`, `sub_group_size`, in elements of the rank's pieces."""


class Zero3Options(ZeroOptions):
    """Stage 3's own settings of when weights are gathered; sizes are in elements.

    What is left out is as the preset has it.
    """

    stage3_max_live_parameters: NonNegativeInt | None = Field(
        None, description="weight elements that may be gathered at once; 0: none is gathered ahead"
    )
    stage3_prefetch_bucket_size: NonNegativeInt | None = Field(
        None, description="weight elements gathered ahead, within stage3_max_live_parameters"
    )
    stage3_max_reuse_distance: NonNegativeInt | None = Field(
        None, description="weights stay gathered that are used again within this many elements"
    )
    stage3_param_persistence_threshold: NonNegativeInt | None = Field(
        None, description="parameters up to this size stay gathered"
    )
    sub_group_size: PositiveInt | None = Field(
        None, description="elements of a rank that are updated at once, at least; default: 1e9"
    )
    leaf_module: Literal["blocks"] | None = Field(
        None, description="blocks: each transformer block is gathered at once, instead of module by module"
    )
    hpz: int | None = Field(
        None,
        ge=2,
        description="ranks of a group that keeps a second copy of the weights once they were gathered in a "
        "step, and gathers them within the group from then on (hierarchical partition of ZeRO++)",
    )
    memory_efficient_linear: bool | None = Field(
        None, description="false: torch's own linear layers instead of DeepSpeed's autograd function"
    )


def gathers_blocks(options: ZeroOptions) -> bool:
    """Whether stage 3 gathers each transformer block at once."""
    return isinstance(options, Zero3Options) and options.leaf_module == "blocks"


def reduces_each(options: BackendOptions) -> bool:
    """Whether gradients are reduced in every micro-step although the library could wait for the last one."""
    return isinstance(options, ReductionOptions) and options.sync_each_batch


def unmet_shards_on_host(options: BackendOptions) -> list[str]:
    """Why FSDP1 cannot add up shards of gradients on the host; empty: it need not.

    torch 2.13 says so of itself (`FlatParamHandle.prepare_gradient_for_backward`, _flat_param.py).
    """
    if not (reduces_each(options) and offloads(options)):
        return []
    return [
        "FSDP1 (torch 2.13) cannot add the gradient of a micro-step to one that lies in host memory; leave "
        "sync_each_batch or offload out, or use fsdp"
    ]


class SequenceOptions(BackendOptions):
    """Neighbours share samples and divide each of them."""

    sequence: int = Field(
        2, ge=2, description="ranks that share samples, each of which computes one part of their tokens"
    )

    def mesh(self, world_size: int) -> Mesh:
        """Groups of neighbours with samples of their own."""
        return Mesh.of(world_size, {"data": None, "sequence": self.sequence})


class ContextParallelOptions(SequenceOptions):
    """How keys and values reach the ranks that share samples."""

    rotation: Rotation = Field(
        "all-gather",
        description="all-gather: keys and values of all parts at once; all-to-all: passed on by neighbours",
    )


class FsdpContextParallelOptions(ContextParallelOptions, Fsdp2Options):
    """FSDP2 whose ranks divide samples."""


class Ulysses12Options(SequenceOptions, Zero12Options):
    """Ulysses under stages 1 and 2."""

    correct_gradients: bool = Field(
        False,
        description="true: takes out the factor by which DeepSpeed's gradients are too large at stages 1 "
        "and 2, the number of ranks that share samples",
    )


class Ulysses3Options(SequenceOptions, Zero3Options):
    """Ulysses under stage 3."""


class TensorOptions(BackendOptions):
    """Tensor parallelism."""

    tensor: int | None = Field(
        None, ge=2, description="ranks that cut each layer; default: all; groups of them are data parallel"
    )

    def mesh(self, world_size: int) -> Mesh:
        return Mesh.of(world_size, {"data": None, "tensor": self.tensor or world_size})


class FsdpTensorOptions(ReductionOptions):
    """FSDP2 of a model whose layers are cut."""

    tensor: int = Field(2, ge=2, description="ranks that cut each layer; the others shard what these hold")

    def mesh(self, world_size: int) -> Mesh:
        return Mesh.of(world_size, {"shard": None, "tensor": self.tensor})


class AutoTpOptions(BackendOptions):
    """DeepSpeed AutoTP."""

    tensor: int = Field(
        2, ge=2, description="ranks that cut each layer; the others share states as ZeRO does"
    )

    def mesh(self, world_size: int) -> Mesh:
        return Mesh.of(world_size, {"data": None, "tensor": self.tensor})


class AutoTp12Options(AutoTpOptions, Zero12Options):
    """AutoTP under stages 1 and 2."""


class AutoTp3Options(AutoTpOptions, Zero3Options):
    """AutoTP under stage 3."""


class PipelineOptions(BackendOptions):
    """Pipeline parallelism of torch.distributed.pipelining."""

    schedule: Literal["1f1b", "gpipe", "interleaved"] = Field(
        "1f1b",
        description="1f1b: forward and backward passes alternate; gpipe: all forward passes first; "
        "interleaved: as 1f1b, with several stages per rank",
    )
    stages: int | None = Field(
        None, ge=2, description="ranks of one pipeline; default: all ranks. The others are data parallel"
    )
    micro_batches: PositiveInt | None = Field(
        None,
        description="parts into which a pipeline cuts the batch of a micro-step; default: as many as ranks",
    )
    stages_per_rank: int = Field(2, ge=2, description="stages that each rank holds, at schedule=interleaved")

    def mesh(self, world_size: int) -> Mesh:
        if world_size < 2:
            raise Unsupported("a pipeline needs at least 2 ranks")
        return Mesh.of(world_size, {"pipeline": self.stages or world_size, "data": None})

    def parts(self, world_size: int) -> int:
        """Micro-batches of a micro-step."""
        return self.micro_batches or self.mesh(world_size).size("pipeline")

    def stages_on(self, ranks: int) -> int:
        """Stages of a pipeline over so many ranks."""
        return ranks * (self.stages_per_rank if self.schedule == "interleaved" else 1)


def parts_of(options: BackendOptions, world_size: int) -> int:
    """Into how many equal parts the samples of a micro-step are cut: 1 unless the ranks are a pipeline."""
    return options.parts(world_size) if isinstance(options, PipelineOptions) else 1


def shard_size(world: World, requested: int | None) -> int:
    """Ranks in one shard group: as requested, else the ranks of a node, else half of the only node."""
    if requested is not None:
        return requested
    return world.ranks_per_node if world.nodes > 1 else max(1, world.world_size // 2)


def unmet_hybrid(world: World, requested: int | None) -> list[str]:
    """Why `world` cannot be cut into shard groups of one size with at least two groups of two ranks."""
    size = shard_size(world, requested)
    return unmet_groups(
        world, "shard_size", size, "hybrid sharding needs at least 2 replicas of at least 2 shards"
    )


def unmet_groups(world: World, option: str, size: int, needs: str) -> list[str]:
    """Why `world` cannot be cut into two or more groups of `size` ranks (2 or more), which `needs` says."""
    if world.world_size % size:
        return [f"{option} {size} does not divide the world size {world.world_size}; choose a divisor"]
    if size < 2 or world.world_size // size < 2:
        return [
            f"{needs}; world size {world.world_size} with {option} {size} gives "
            f"{world.world_size // size} x {size}"
        ]
    return []


def unmet_second_copy(world: World, options: BackendOptions) -> list[str]:
    """Why `world` has no such groups; empty: it has, or none are asked for."""
    given = [(name, size) for name in SECOND_COPY if (size := getattr(options, name, None)) is not None]
    if given and options.mesh(world.world_size).shares_samples:
        return [f"{name} is run only where every rank has samples of its own" for name, _ in given]
    return [
        why
        for name, size in given
        for why in unmet_groups(world, name, size, f"{name} needs at least 2 groups of at least 2 ranks")
    ]
