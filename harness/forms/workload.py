"""What decides the memory and the communication of one rank; built from a record or from a model alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from harness.backends.base import OptimizerImplementation, OptimizerKind, Precision, Preset
from harness.backends.mesh import SECOND_COPY, Mesh
from harness.backends.optimizer.kinds import NewtonSchulz
from harness.backends.strategy import StrategyKind
from harness.forms.layout import COMPUTE, DTYPE_BYTES, Derivations, Layout, Tensor
from harness.nested import grouped

Role = str
"""What a group of ranks is for: 'world'; 'shard' or 'replica' of hybrid sharding; else the dimensions of the
mesh along which it lies, such as 'tensor' or 'data+sequence'."""
ELSEWHERE = "other"
"""In place of a role: a group whose ranks are not those that a role has."""
ORDINARY_STEP = 2
"""The first step that does as all later ones: before it Adam has no states, DDP orders its buckets and
ZeRO-3 records its trace."""


@dataclass(frozen=True, kw_only=True)
class Workload(Derivations):
    """A model, trained under one strategy, as one rank sees it."""

    layout: Layout
    strategy: StrategyKind
    world_size: int
    rank: int = 0
    shard_size: int | None = None
    """Ranks that share one copy of the weights; None: all."""
    mesh: Mesh | None = None
    """The dimensions of the ranks; None: all of them are data parallel."""
    ranks_per_node: int | None = None
    """None: one node."""
    precision: Precision = "fp32"
    preset: Preset = "like-for-like"
    micro_batch_size: int = 1
    accumulation_steps: int = 1
    sequence_length: int | None = None
    gradient_clipping: float | None = 1.0
    """Largest norm of the gradient; None or 0: no clipping."""
    activation_checkpointing: bool | str = False
    """As `training.activation_checkpointing` of the job."""
    recomputed_until: str | None = None
    """The module of each block in which its recomputation stops; None: not known."""
    optimizer: OptimizerKind = "adamw"
    newton_schulz: NewtonSchulz = "fp32"
    """Precision in which Muon orthogonalises."""
    momentum: float = 0.0
    """Of SGD, which keeps nothing without it."""
    optimizer_implementation: OptimizerImplementation = "default"
    """As the job has it; 'default': torch chooses by device."""
    original_parameters: bool = True
    """FSDP1: whether the optimizer holds original parameters, not the flat one of each unit."""
    device: str = "cpu"
    transport: str = "gloo"
    has_fp64: bool = True
    """Whether the device has fp64, in which DeepSpeed adds up norms."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the backend, as typed after its name."""
    steps: tuple[int, ...] = (ORDINARY_STEP,)
    """Indices, from 0, of the steps that are summed up."""
    evaluation_every: int | None = None
    """Steps between evaluations, which leave weights gathered for the step that follows."""

    def follows_evaluation(self, step: int) -> bool:
        """Whether an evaluation ran between the step before and this one."""
        return bool(self.evaluation_every) and step > 0 and step % (self.evaluation_every or 1) == 0

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that divide the sequence of each sample; 1: none do."""
        return self.mesh.size("sequence") if self.mesh is not None else 1

    @property
    def part_length(self) -> int | None:
        """Tokens of each sample that a rank computes, padding of its sequence included; None: no text."""
        length = self.sequence_length
        return None if length is None else part_length(length, self.ranks_per_sample)

    @property
    def like_for_like(self) -> bool:
        return self.preset == "like-for-like"

    @property
    def mixed(self) -> bool:
        return self.precision.endswith("-mixed")

    @cached_property
    def compute_dtype(self) -> str:
        """Dtype of the weights that a library casts for computing; `single:precision=fp32` widens them."""
        return "float32" if self.widened else COMPUTE[self.precision]

    @property
    def widened(self) -> bool:
        """Whether the whole model is made fp32 whatever the job's precision."""
        return bool(self.options.get("precision") == "fp32")

    @property
    def master_dtype(self) -> str:
        """Dtype of the weights that the optimizer updates: fp32 unless precision or options say otherwise."""
        low = self.precision == "bf16" or self.options.get("master_dtype") == "compute"
        return self.compute_dtype if low else "float32"

    @cached_property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.compute_dtype]

    @cached_property
    def master_bytes(self) -> int:
        return DTYPE_BYTES[self.master_dtype]

    def held_dtype(self, tensor: Tensor) -> str:
        """Dtype in which a library holds a parameter between its uses: masters if it is trained.

        DeepSpeed casts the whole model at low precision (`_configure_distributed_model`, engine.py).
        Accelerate 1.15 makes fp32 what is trained, and leaves frozen weights as they are
        (`fsdp2_prepare_model`, fsdp_utils.py).
        """
        if "float" not in tensor.dtype:
            return tensor.dtype  # packed 4-bit weights
        in_deepspeed = self.strategy.zero_stage is not None and self.precision != "fp32"
        if in_deepspeed or self.widened or self.options.get("master_dtype") == "compute":
            return self.compute_dtype
        return tensor.dtype if self.layout.is_frozen(tensor) else self.master_dtype

    def gathered_bytes(self, tensor: Tensor) -> int:
        """Per element of a weight that ranks gather for computing: packed ones stay as they are."""
        return self.compute_bytes if "float" in tensor.dtype else DTYPE_BYTES[tensor.dtype]

    def by_held_dtype(self, tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
        """Parameters by the dtype in which they are held, in their order."""
        return grouped((self.held_dtype(tensor), tensor) for tensor in tensors)

    def held_bytes(self, tensor: Tensor) -> int:
        """Per element."""
        return DTYPE_BYTES[self.held_dtype(tensor)]

    def units(self) -> list[tuple[str, list[Tensor]]]:
        """Parameters by wrap unit, as the layout has them, unless an option wraps the whole model as one."""
        whole = self.options.get("auto_wrap") == "none"
        return [("", list(self.layout.parameters))] if whole else self.layout.units()

    @property
    def offload(self) -> str:
        """'none', 'optimizer' or 'cpu'."""
        return str(self.options.get("offload", "none"))

    @property
    def offloads_weights(self) -> bool:
        """Whether weights lie in host memory while no module uses them."""
        return self.offload == "cpu"

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states lie in host memory."""
        return self.offload != "none"

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped; options of DeepSpeed's backends overrule the job."""
        own = self.options.get("gradient_clipping")
        limit = self.gradient_clipping if own is None else own
        return (limit or 0.0) > 0 or bool(self.options.get("default_clipping"))

    @property
    def shards(self) -> int:
        """Ranks of a shard group."""
        return self.shard_size or self.world_size

    @property
    def reduces_each(self) -> bool:
        """Whether gradients of torch's strategies are reduced in every micro-step, not in the last one."""
        return bool(self.options.get("sync_each_batch"))

    @property
    def reductions(self) -> int:
        """Micro-steps of a step that reduce gradients, under torch's strategies."""
        return self.accumulation_steps if self.reduces_each else 1

    @property
    def second_copy_ranks(self) -> int | None:
        """Ranks of a group that keeps a second copy of the weights between their uses in a step and gathers
        from it: of hpZ, or those to which FSDP2 reshards; None: there is none."""
        return second_copy_ranks(self.options)

    @property
    def regathered_in(self) -> Role:
        """The group in which weights are gathered that were gathered before in the same step."""
        return "world" if self.second_copy_ranks is None else "shard"

    @property
    def shard_rank(self) -> int:
        """Position within the shard group; groups are consecutive ranks."""
        return self.rank % self.shards

    def group_size(self, role: Role) -> int:
        """Ranks in a group of this role."""
        if self.mesh is not None and self.mesh.shares_samples:
            return self.mesh.group_size(role)
        if role == "shard":
            return self.second_copy_ranks or self.shards
        return self.world_size // self.shards if role == "replica" else self.world_size

    def group_ranks(self, role: Role, rank: int) -> list[int]:
        """Ranks of the group of this role that `rank` is in: shard groups are rows of the mesh, replica
        groups its columns (`init_device_mesh`)."""
        if self.mesh is not None and self.mesh.shares_samples:
            return self.mesh.group(role, rank)
        size = self.shards
        if role == "shard":
            size = self.group_size(role)
            first = rank - rank % size
            return list(range(first, first + size))
        return list(
            range(rank % size, self.world_size, size) if role == "replica" else range(self.world_size)
        )


def second_copy_ranks(options: Mapping[str, Any]) -> int | None:
    """As `Workload.second_copy_ranks`, from the options of a backend."""
    return next((int(size) for name in SECOND_COPY if (size := options.get(name))), None)


def part_length(sequence_length: int, parts: int) -> int:
    """Tokens of each of `parts` equal parts of a sample, whose end is padded."""
    return -(-sequence_length // parts)
