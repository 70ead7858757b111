"""What closed forms of memory take and give: a setting, and named terms in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from harness.record import LayoutPart, TensorPart

STATE_KINDS = ("weights", "gradients", "masters", "optimizer")
"""Kinds that make the model states; every byte of them has a closed form."""
DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
    "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
ADAM_MOMENTS = 2
ADAM_STEP_BYTES = 4
"""torch.optim.AdamW keeps one fp32 scalar `step` per parameter, on the host unless capturable or fused
(torch 2.13, `optim/adam.py`, `Adam._init_group`)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One rank of one run, as far as its model states depend on it."""

    layout: LayoutPart
    backend: str
    """A registered name, such as 'zero2'."""
    precision: str
    preset: str
    world_size: int
    rank: int = 0
    shard_size: int | None = None
    """Ranks that share one copy of the weights; None: all."""
    accumulation_steps: int = 1
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        return self.shard_size or self.world_size

    @property
    def shard_rank(self) -> int:
        """Position within the shard group; groups are consecutive ranks."""
        return self.rank % self.shards

    @property
    def trained_bytes(self) -> int:
        """Bytes per element of the weights that the optimizer updates: 4 unless precision or options
        leave out the fp32 masters."""
        no_masters = self.precision == "bf16" or self.options.get("masters") == "compute"
        return self.compute_bytes if no_masters else 4

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of the weights that a library casts for computing."""
        return 4 if self.precision == "fp32" or self.widened else 2

    @property
    def widened(self) -> bool:
        """Whether the whole model is made fp32 whatever the job's precision (`single:precision=fp32`)."""
        return self.options.get("precision") == "fp32"

    @property
    def offload(self) -> str:
        return str(self.options.get("offload", "none"))

    def groups(self) -> list[list[TensorPart]]:
        """Parameters by optimizer group: those that decay, then the rest; empty groups are left out."""
        decaying = set(self.layout.decaying)
        split: tuple[list[TensorPart], list[TensorPart]] = ([], [])
        for parameter in self.layout.parameters:
            split[0 if parameter.name in decaying else 1].append(parameter)
        return [group for group in split if group]

    def units(self) -> list[list[TensorPart]]:
        """Parameters by wrap unit: one per block, then the root; empty units are left out."""
        blocks, root = self.blocks_and_root()
        return [unit for unit in (*blocks, root) if unit]

    def blocks_and_root(self) -> tuple[list[list[TensorPart]], list[TensorPart]]:
        """Parameters of each block, and those that lie in none."""
        blocks: dict[str, list[TensorPart]] = {block: [] for block in self.layout.blocks}
        root: list[TensorPart] = []
        for parameter in self.layout.parameters:
            owner = next((b for b in blocks if parameter.name.startswith(f"{b}.")), None)
            (root if owner is None else blocks[owner]).append(parameter)
        return list(blocks.values()), root


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of one kind, with the reason why it is there."""

    kind: str
    name: str
    bytes: int
    host: bool = False
    """Lies in host memory also when the run computes on another device."""
    extra: bool = False
    """Beyond the rank's own share of the strategy: padding, copies, counters, buffers."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank holds of parameters that are cut over ranks, in elements."""

    own: int
    padding: int
    padding_name: str
    """Why there is padding."""

    def terms(
        self, kind: str, name: str, width: int, *, host: bool = False, extra: bool = False
    ) -> list[Term]:
        """The own elements under `name` and the padding under its own, at `width` bytes per element.

        `extra`: the own elements too are beyond the strategy's share, as in a second copy.
        """
        return [
            Term(kind=kind, name=name, bytes=self.own * width, host=host, extra=extra),
            Term(kind=kind, name=self.padding_name, bytes=self.padding * width, host=host, extra=True),
        ]

    def unpadded(self) -> Share:
        """The same without padding."""
        return replace(self, padding=0)


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """What one rank holds between its backward pass and its update, from the second step on."""

    terms: tuple[Term, ...]

    def kinds(self, *, host: bool | None = None) -> dict[str, int]:
        """Bytes by kind; `host` True or False: only what lies there or on the device."""
        sums: dict[str, int] = {}
        for term in self.terms:
            if host is None or term.host == host:
                sums[term.kind] = sums.get(term.kind, 0) + term.bytes
        return sums

    @property
    def model_state_bytes(self) -> int:
        kinds = self.kinds()
        return sum(kinds.get(kind, 0) for kind in STATE_KINDS)


def states(terms: Sequence[Term]) -> ModelStates:
    """Collect terms; those of no bytes are left out."""
    return ModelStates(terms=tuple(term for term in terms if term.bytes))


def numel(tensor: TensorPart) -> int:
    """Elements of a tensor."""
    return prod(tensor.shape)


def elements(tensors: Sequence[TensorPart]) -> int:
    """Elements of several tensors."""
    return sum(map(numel, tensors))


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def step_counters(count: int) -> Term:
    """Adam's counters of steps, one per tensor that it updates."""
    return Term(
        kind="optimizer",
        name="Adam's step counters",
        bytes=ADAM_STEP_BYTES * count,
        host=True,
        extra=True,
    )


def buffer_terms(setting: Setting) -> list[Term]:
    """The model's buffers: every rank holds them, and every library keeps their dtypes here."""
    size = sum(numel(buffer) * _buffer_bytes(setting, buffer) for buffer in setting.layout.buffers)
    return [Term(kind="buffers", name="model buffers", bytes=size, extra=True)]


def _buffer_bytes(setting: Setting, buffer: TensorPart) -> int:
    """Per element."""
    is_float = "float" in buffer.dtype
    return DTYPE_BYTES["float32" if is_float and setting.widened else buffer.dtype]
