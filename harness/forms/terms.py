"""Bytes of a ring, named terms of model states, and named collectives."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

from harness.forms.layout import DTYPE_BYTES, Tensor
from harness.forms.workload import Role, Workload
from harness.nested import totals

RING_PASSES = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "broadcast": 1,
    "reduce": 1,
    "gather": 1,
    "scatter": 1,
    "barrier": 0,
}
MESSAGES = ("permute", "send", "recv")
"""From one rank to one other."""
GATHERING = ("all_gather", "broadcast", "barrier")
"""What ranks with samples of their own send in the forward pass: weights, buffers, statistics of a batch."""
SCALAR_BYTES = 8
"""Of a collective: such as a loss or a count that is gathered for a log. A weight alone is as small, but not
all of a model's."""
OPERATIONS = frozenset({*RING_PASSES, *MESSAGES})
"""Every collective and message that is counted."""


def may_reduce(phase: str, op: str) -> bool:
    """Whether a collective of a step may exchange gradients: what is gathered before a backward pass may be
    weights or an evaluation's answers."""
    return phase in STEP_PHASES and (phase != "forward" or op not in GATHERING)


def ring_sent_bytes(op: str, payload_bytes: int, group_size: int) -> float:
    """Bytes that one rank of a ring sends, on average, for a collective on `payload_bytes`.

    passes x (n - 1) / n x payload; all-reduce has two passes, a barrier none, the others one.
    `send` and `permute`, which hands all of it to one other rank, send what they are given, `recv` nothing.
    Raises KeyError for a collective without a factor.
    """
    if op == "permute":
        return float(payload_bytes) if group_size > 1 else 0.0
    if op in ("send", "recv"):
        return float(payload_bytes) if op == "send" else 0.0
    # Whole numbers up to the division, which rounds once.
    return RING_PASSES[op] * (group_size - 1) * payload_bytes / group_size


def ring_formula(op: str, payload_bytes: int, group_size: int) -> str:
    """How `ring_sent_bytes` comes about, with its figures, in bytes."""
    if op == "recv":
        return "0 bytes: the other side sends them"
    if op in MESSAGES:
        return f"all {payload_bytes:,} bytes, to the next rank"
    passes = RING_PASSES[op]
    factor = f"{passes} x " if passes != 1 else ""
    return f"{factor}({group_size} - 1) / {group_size} x {payload_bytes:,} bytes"


STATE_KINDS = ("weights", "gradients", "masters", "optimizer")
"""Kinds that make the model states; every byte of them has a closed form."""
STEP_PHASES = ("forward", "backward", "step")
BETWEEN = "between"
"""Of observed scripts: what is no part of the passes and the update of the model that trains."""

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


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of what a rank holds, of one kind, with the reason why it is there."""

    kind: str
    """One of STATE_KINDS, 'gathered', 'activations', 'communication', 'buffers', 'data' or 'temporary'."""
    name: str
    """What it is, in a few words."""
    bytes: int = 0
    """Its size on the rank; 0 of a cause whose size a ledger counts."""
    host: bool = False
    """Lies in host memory also when the run computes on another device."""
    extra: bool = False
    """Beyond the rank's own share of the strategy: padding, copies, counters, buffers."""
    formula: str = ""
    """With the symbols of `docs/planning.md`, such as '2 b s h L'."""
    source: str = ""
    """Paper, or library with version, file and function."""

    def __hash__(self) -> int:  # a ledger looks terms up by the thousand
        return hash((self.kind, self.name, self.bytes))


@cache
def _known_terms() -> dict[str, dict[str, Any]]:
    return tomllib.loads(
        files("harness.forms.peak_memory").joinpath("terms.toml").read_text(encoding="utf-8")
    )


def named_terms(family: str) -> SimpleNamespace:
    """Parts of the memory of a family by name, as `peak_memory/terms.toml` has them; without their sizes."""
    return SimpleNamespace(**{name: Term(**term) for name, term in _known_terms()[family].items()})


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
        """Share without padding."""
        return replace(self, padding=0)


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """What one rank holds between its backward pass and its update, from the second step on."""

    terms: tuple[Term, ...]
    """Parts of the model states."""
    files: tuple[Term, ...] = ()
    """Always empty; records with forms of a third party's backend have it."""
    unknown: str | None = None
    """Why the optimizer's states are not among the terms; None: they are."""

    def kinds(self, *, host: bool | None = None) -> dict[str, int]:
        """Bytes by kind; `host` True or False: only what lies there or on the device."""
        return by_kind(term for term in self.terms if host is None or term.host == host)

    @property
    def model_state_bytes(self) -> int:
        kinds = self.kinds()
        return sum(kinds.get(kind, 0) for kind in STATE_KINDS)


def states(terms: Sequence[Term]) -> ModelStates:
    """Collect terms; those of no bytes are left out."""
    return ModelStates(terms=tuple(term for term in terms if term.bytes))


def by_kind(terms: Iterable[Term]) -> dict[str, int]:
    """Bytes of terms by kind."""
    return totals((term.kind, term.bytes) for term in terms)


def merged(terms: Iterable[Term]) -> list[Term]:
    """Terms that differ in their size only, added up."""
    found = totals((replace(term, bytes=0), term.bytes) for term in terms)
    return [replace(kind, bytes=size) for kind, size in found.items()]


@dataclass(frozen=True)
class Collective:
    """Calls of one kind that have one cause."""

    phase: str
    """Phase of the run."""
    op: str
    """Operation, such as 'all_reduce'."""
    dtype: str
    """Dtype of the tensors."""
    term: str
    """The cause, in a few words."""
    payload_bytes: int
    """Of all calls together: size of the whole tensors that they work on."""
    calls: int | None = 1
    """None: how many depends on the order in which gradients become ready. 0: a part of calls that are
    counted under another term, such as their padding."""
    role: Role = "world"
    """What the group is for: all ranks, one copy of the weights, or the same shard."""

    def sent_bytes(self, workload: Workload) -> float:
        """Ring bytes that a rank sends."""
        return ring_sent_bytes(self.op, self.payload_bytes, workload.group_size(self.role))


@dataclass(frozen=True, kw_only=True)
class Underived:
    """Collectives of a phase whose payload does not follow from the job."""

    phase: str
    """Phase of the run."""
    dtypes: tuple[str, ...]
    """Empty: whatever the dtype."""
    reason: str
    """Why there is no closed form."""

    def covers(self, phase: str, dtype: str) -> bool:
        return phase == self.phase and (not self.dtypes or dtype in self.dtypes)


@dataclass(frozen=True, kw_only=True)
class Volume:
    """What the steps of a run are expected to communicate, or why that is not known."""

    collectives: tuple[Collective, ...] = ()
    """Calls with their cause."""
    remarks: tuple[tuple[str, str], ...] = ()
    """(term, why this implementation moves less under it than the textbook, or by another collective)."""
    unknown: str | None = None
    """Why the steps could not be derived; None: they were."""
    underived: tuple[Underived, ...] = ()
    """Parts of the steps without a closed form."""


@dataclass(frozen=True, kw_only=True)
class OwnForms:
    """Closed forms that a third party's backend brought, evaluated for one run."""

    states: tuple[ModelStates, ...]
    """By rank."""
    volume: Volume
    """Collectives expected of the run."""
    steps: tuple[int, ...]
    """The probed steps that the volume sums up."""


def over_steps(workload: Workload, one_step: Callable[[Workload, int], list[Collective]]) -> list[Collective]:
    """The collectives of all probed steps."""
    return [collective for step in workload.steps for collective in one_step(workload, step)]


def reducing_passes(reductions: int) -> list[tuple[str, int]]:
    """Terms of the gradients of a step that so many micro-steps reduce, and how many each stands for."""
    further = reductions - 1
    return [(GRADIENTS, 1), *([(FURTHER_GRADIENTS, further)] if further else [])]


Sizes = Sequence[tuple[int, int]]


"""(elements, elements with padding) of each unit that is gathered or reduced at once."""


def whole_sizes(tensors: Iterable[Tensor]) -> Sizes:
    """Sizes of tensors that cross the wire one by one and without padding."""
    return [(tensor.numel, tensor.numel) for tensor in tensors]


def gathered(
    phase: str,
    term: str,
    sizes: Sizes,
    dtype: str,
    *,
    op: str = "all_gather",
    role: Role = "world",
    calls: int | None = None,
    passes: int = 1,
) -> list[Collective]:
    """Collectives over units, their padding under a term of its own."""
    width = DTYPE_BYTES[dtype]
    total = sum(numel for numel, _ in sizes) * width * passes
    padding = sum(padded_numel - numel for numel, padded_numel in sizes) * width * passes
    count = len(sizes) * passes if calls is None else calls * passes
    whole = [Collective(phase, op, dtype, term, total, count, role)] if sizes and passes else []
    return whole + ([Collective(phase, op, dtype, PADDING, padding, 0, role)] if padding else [])
