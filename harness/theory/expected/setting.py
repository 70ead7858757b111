"""What of a job decides its communication, and the collectives that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from harness.theory.communication import ring_sent_bytes

Role = Literal["world", "shard", "replica"]
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "none": 0,
}  # fmt: skip
COMPUTE = {"fp32": "float32", "bf16-mixed": "bfloat16", "fp16-mixed": "float16", "bf16": "bfloat16"}
"""Dtype of matrix products at each precision."""

GRADIENTS = "gradients reduced"
REPLICAS = "gradients reduced across replicas"
FORWARD = "weights gathered for the forward pass"
BACKWARD = "weights gathered for the backward pass"
UPDATED = "updated weights gathered"
FURTHER_GRADIENTS = "gradients reduced in further micro-steps"
FURTHER_FORWARD = "weights gathered for the forward pass of further micro-steps"
FURTHER_BACKWARD = "weights gathered for the backward pass of further micro-steps"
PADDING = "padding"
NORM = "gradient norm"
OVERFLOW = "overflow flag"
BUFFERS = "buffers broadcast"


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer of the bare model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A job under one backend, as far as communication goes."""

    parameters: tuple[Tensor, ...]
    """In the model's order; a tied tensor once, under its first name."""
    tied: dict[str, str]
    """Further name of a tied parameter -> its first name."""
    decaying: frozenset[str]
    buffers: tuple[Tensor, ...]
    blocks: tuple[str, ...]
    precision: str
    preset: str
    world_size: int
    shard_size: int
    """Ranks that share one copy of the weights in hybrid sharding; elsewhere the world size."""
    accumulation_steps: int
    clipping: bool
    offload: str
    """'none', 'optimizer' or 'cpu'."""
    steps: tuple[int, ...]
    """Indices, from 0, of the steps to be summed."""
    reduce_bucket_elements: int | None = None
    """Option of ZeRO; None: by the preset."""
    evaluation_every: int | None = None
    evaluation_passes: int = 0
    """Forward passes of one rank in all evaluations."""
    evaluation_spells: int = 0
    """Spells of such passes without a training step between them."""
    activation_checkpointing: bool = False
    recomputed_until: str | None = None
    """The module of each block in which its recomputation stops; None: not known."""
    digest: bool = False
    checkpoint: bool = False
    master_dtype: str = "float32"
    """Dtype of the weights that the optimizer updates."""
    fp64_norm: bool = True
    """Whether the device has fp64, in which DeepSpeed accumulates norms."""

    @property
    def parameter_count(self) -> int:
        return sum(tensor.numel for tensor in self.parameters)

    @property
    def compute_dtype(self) -> str:
        return COMPUTE[self.precision]

    @property
    def mixed(self) -> bool:
        return self.precision.endswith("-mixed")

    @property
    def like_for_like(self) -> bool:
        return self.preset == "like-for-like"

    def group_size(self, role: Role) -> int:
        """Ranks in a group of this role."""
        if role == "shard":
            return self.shard_size
        return self.world_size // self.shard_size if role == "replica" else self.world_size

    def group_ranks(self, role: Role, rank: int) -> list[int]:
        """Ranks of the group of this role that `rank` is in: shard groups are rows of the mesh, replica
        groups its columns (`init_device_mesh`)."""
        size = self.shard_size
        if role == "shard":
            first = rank - rank % size
            return list(range(first, first + size))
        return list(range(rank % size, self.world_size, size)) if role == "replica" else self.world

    @property
    def world(self) -> list[int]:
        """Every rank."""
        return list(range(self.world_size))

    def follows_evaluation(self, step: int) -> bool:
        """Whether an evaluation ran between the step before and this one."""
        return bool(self.evaluation_every) and step > 0 and step % (self.evaluation_every or 1) == 0

    def units(self) -> list[tuple[str, list[Tensor]]]:
        """Parameters by wrap unit: one per block, and '' for the rest of the model."""
        units: dict[str, list[Tensor]] = {name: [] for name in (*self.blocks, "")}
        for tensor in self.parameters:
            owner = next((b for b in self.blocks if tensor.name.startswith(f"{b}.")), "")
            units[owner].append(tensor)
        return [(name, tensors) for name, tensors in units.items() if tensors]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Calls of one kind that have one cause."""

    phase: str
    op: str
    dtype: str
    term: str
    """The cause, in a few words."""
    payload_bytes: int
    """Of all calls together: size of the whole tensors that they work on."""
    calls: int | None = 1
    """None: how many depends on the order in which gradients become ready. 0: a part of calls that are
    counted under another term, such as their padding."""
    role: Role = "world"

    def sent_bytes(self, setting: Setting) -> float:
        """Ring bytes that a rank sends."""
        return ring_sent_bytes(self.op, self.payload_bytes, setting.group_size(self.role))


@dataclass(frozen=True, kw_only=True)
class Underived:
    """Collectives of a phase whose payload does not follow from the job."""

    phase: str
    dtypes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Volume:
    """What a run is expected to communicate, or why that is not known."""

    collectives: tuple[Collective, ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    """(term, why this implementation moves less under it than the textbook, or by another collective)."""
    unknown: str | None = None
    """Why nothing can be said of the steps and evaluations; None: they were derived."""
    underived: tuple[Underived, ...] = ()


PerStep = Callable[[Setting, int], list[Collective]]


def over_steps(setting: Setting, one_step: PerStep) -> list[Collective]:
    """The collectives of all steps of a setting."""
    return [collective for step in setting.steps for collective in one_step(setting, step)]


def padded(numel: int, multiple: int) -> int:
    """The smallest multiple that is not below `numel`."""
    return -(-numel // multiple) * multiple


def gathered(
    phase: str,
    term: str,
    sizes: Sequence[tuple[int, int]],
    dtype: str,
    *,
    op: str = "all_gather",
    role: Role = "world",
    calls: int | None = None,
    passes: int = 1,
) -> list[Collective]:
    """Collectives over units of (elements, elements with padding), the padding apart."""
    width = DTYPE_BYTES[dtype]
    whole = sum(numel for numel, _ in sizes) * width * passes
    padding = sum(padded_numel - numel for numel, padded_numel in sizes) * width * passes
    count = len(sizes) * passes if calls is None else calls * passes
    found = []
    if sizes and passes:
        found.append(
            Collective(
                phase=phase, op=op, dtype=dtype, term=term, payload_bytes=whole, calls=count, role=role
            )
        )
    if padding:
        found.append(
            Collective(
                phase=phase, op=op, dtype=dtype, term=PADDING, payload_bytes=padding, calls=0, role=role
            )
        )
    return found
