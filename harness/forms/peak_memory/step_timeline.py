"""What a rank holds as a step proceeds: the ledger by cause, and the hooks that families fill in."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.forms.families import model_states
from harness.forms.model.layout import Layout, Tensor, elements
from harness.forms.optimizer.step import step_temporary, update_copies, updated_tensors
from harness.forms.terms import Term, named_terms
from harness.forms.workload import Workload
from harness.forms.zero.stages import gradient_accumulation_bytes

Phase = Literal["forward", "backward", "reduction", "step"]


@dataclass(frozen=True, kw_only=True)
class PeakMoment:
    """A state of the ledger."""

    bytes: int
    held: dict[Term, int]
    reserved: int = 0
    """What the allocator keeps for the whole step, at least: each stream has blocks of its own, which serve
    no other (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, BlockPool)."""


TRACED = "traced: transformers' model on fake tensors (harness/rank/probes/activation_trace.py)"
BELOW = Term(
    kind="activations", name="of the other segments", formula="what they hold at that moment", source=TRACED
)
HERE = Term(
    kind="activations", name="inside the segment that computes", formula="its fullest moment", source=TRACED
)


class Ledger:
    """A family adds and drops; whoever drives it says how much the activations take.

    Sums are kept as bytes come and go: a step has thousands of moments, of which few are kept.
    """

    def __init__(self) -> None:
        self.phase: Phase = "forward"
        self.held: dict[Term, int] = {}
        self.below = 0
        """Bytes of activations of the segments that do not compute."""
        self.here = 0
        """Of the one that does."""
        self._total = 0
        """Of all that is held."""
        self._elsewhere = 0
        """Of that, on streams of their own."""
        self._peaks: dict[Phase, tuple[int, dict[Term, int]]] = {}
        self._streams: dict[str, int] = {}
        self._most: dict[str, int] = {"": 0}
        """By stream."""

    def add(self, holding: Term, count: int) -> None:
        """Allocate bytes."""
        if count:
            self.held[holding] = self.held.get(holding, 0) + count
            self._change(holding, count)

    def drop(self, holding: Term, count: int | None = None) -> None:
        """Free bytes; None: all of this cause."""
        gone = self.held.pop(holding, 0) if count is None else count
        if count:
            self.held[holding] -= count
        if gone:
            self._change(holding, -gone)

    def _change(self, holding: Term, change: int) -> None:
        self._total += change
        if stream := holding.stream:
            self._elsewhere += change
            self._streams[stream] = there = self._streams.get(stream, 0) + change
            self._most[stream] = max(there, self._most.get(stream, 0))

    def since(self, held: Mapping[Term, int]) -> dict[Term, int]:
        """By how many bytes what is held differs from what was."""
        changes = {term: self.held.get(term, 0) - held.get(term, 0) for term in (*held, *self.held)}
        return {term: change for term, change in changes.items() if change}

    def repeat(self, changes: Mapping[Term, int], times: int) -> None:
        """Change what is held by so many times these bytes."""
        for term, change in changes.items():
            self.add(term, change * times)

    def compute(self, below: int, here: int = 0) -> None:
        """Bytes of activations from now on."""
        self.below, self.here = below, here

    @property
    def peaks(self) -> dict[Phase, PeakMoment]:
        """The fullest state of each phase, without what other streams keep."""
        return {
            phase: PeakMoment(bytes=total, held={term: count for term, count in held.items() if count})
            for phase, (total, held) in self._peaks.items()
        }

    def moments(self) -> dict[Phase, PeakMoment]:
        """The fullest state of each phase."""
        reserved = sum(self._most.values())
        return {phase: replace(fullest, reserved=reserved) for phase, fullest in self.peaks.items()}

    @property
    def all_held(self) -> int:
        """Bytes without activations, on the stream that computes."""
        return self._total - self._elsewhere

    @property
    def kept(self) -> int:
        """What the allocator keeps on the stream that computes, as far as is known."""
        return self._most[""]

    def keep(self, count: int) -> None:
        """It keeps so many bytes there at least."""
        self._most[""] = max(self._most[""], count)

    def look(self) -> None:
        """Compare the present state with the fullest of its phase."""
        total = self._total + self.below + self.here
        if total - self._elsewhere > self._most[""]:
            self._most[""] = total - self._elsewhere
        peak = self._peaks.get(self.phase)
        if peak is None or total > peak[0]:
            self._peaks[self.phase] = total, {**self.held, BELOW: self.below, HERE: self.here}

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count as another phase inside."""
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def briefly(self, *holdings: tuple[Term, int]) -> None:
        """Look at the ledger while these are there, and no longer."""
        for holding, count in holdings:
            self.add(holding, count)
        self.look()
        for holding, count in holdings:
            self.drop(holding, count)


DOUBLE_BYTES = 8
NORM_COPY, GRADIENTS, BATCH, GLOO_GATHER, GLOO_REDUCE_SCATTER = named_terms(
    "step_timeline", "norm_copy gradients batch gloo_gather gloo_reduce_scatter"
)


def harness_norm(workload: Workload, largest: int) -> tuple[Term, int]:
    """`backends/optimizer/gradients.py`, global_norm, over tensors of at most `largest` elements.

    Neither dot products of short pieces (fp32 on the CPU) nor `_foreach_norm` (CUDA) copy a gradient; what
    they add up in is less than a thousandth of it.
    """
    copies = workload.device == "cpu" and workload.master_dtype != "float32"
    return NORM_COPY, DOUBLE_BYTES * largest if copies else 0


def deepspeed_norm(workload: Workload, largest: int) -> tuple[Term, int]:
    """`g.data.to(get_norm_dtype())` of one gradient after the other (DeepSpeed, get_grad_norm_direct)."""
    return NORM_COPY, DOUBLE_BYTES * largest if workload.has_fp64 else 0


STATE_SOURCE = "harness.forms, closed forms of the model states"


BATCH_BYTES = 16


@dataclass(frozen=True)
class Unit:
    """A block, or '' for all other modules."""

    name: str
    parameters: tuple[Tensor, ...]

    @property
    def elements(self) -> int:
        return elements(self.parameters)

    def trained(self, layout: Layout) -> tuple[Tensor, ...]:
        """Those that get gradients."""
        return tuple(tensor for tensor in self.parameters if not layout.is_frozen(tensor))


def _shapes(layout: Layout) -> dict[str, Hashable]:
    return {
        name: tuple((t.name.removeprefix(name), t.shape, t.dtype, layout.is_reached(t)) for t in tensors)
        for name, tensors in layout.units()
    }


@dataclass
class StepTimeline:
    """One step under one strategy; this one is a single process, which shards and reduces nothing."""

    workload: Workload
    ledger: Ledger
    units: tuple[Unit, ...] = field(init=False)
    root: Unit | None = field(init=False)
    micro_step: int = 0
    there: set[str] = field(default_factory=set)
    """Names of units whose weights are gathered: ahead (FSDP2), or and not freed yet (FSDP1)."""
    looks_ahead = 0
    """Blocks that are gathered before it is their turn."""
    forward_alike = True
    """Whether equal blocks change the ledger alike in the forward pass."""
    backward_alike = True
    """The same in the backward pass."""
    last_differs = True
    """Whether the last micro-step does what others do not."""

    def __post_init__(self) -> None:
        named = self.workload.units()
        self.units = tuple(Unit(name, tuple(tensors)) for name, tensors in named if name)
        self.root = next((Unit(name, tuple(tensors)) for name, tensors in named if not name), None)

    @property
    def shapes(self) -> list[Hashable]:
        """Of each block, what distinguishes its parameters from those of another."""
        layout = self.workload.layout
        shapes = layout.once("shapes of units", lambda: _shapes(layout))
        return [shapes[unit.name] for unit in self.units]

    @property
    def last_micro_step(self) -> bool:
        return self.micro_step == self.workload.accumulation_steps - 1

    @property
    def reduces(self) -> bool:
        """Whether this micro-step reduces gradients, under torch's strategies."""
        return self.last_micro_step or self.workload.reduces_each

    @property
    def adds_up_whole(self) -> bool:
        """Whether gradients of micro-steps before this one are there and were not reduced."""
        return self.micro_step > 0 and not self.workload.reduces_each

    def begin(self) -> None:
        """What is there as every ordinary step begins: all states but gradients."""
        for term in model_states(self.workload).terms:
            on_device = not term.host or self.workload.device == "cpu"
            if on_device and (term.kind != "gradients" or self.keeps_gradient(host=term.host)):
                holding = Term(kind=term.kind, name=term.name, source=STATE_SOURCE)
                self.ledger.add(holding, term.bytes)
        batches = min(2, self.workload.accumulation_steps)
        tokens = self.workload.micro_batch_size * (self.workload.sequence_length or 0)
        self.ledger.add(BATCH, batches * BATCH_BYTES * tokens)

    def keeps_gradient(self, *, host: bool) -> bool:
        """Whether a gradient of the closed form stays between steps; `host`: it lies there on CUDA."""
        return False

    def before_model(self) -> None:
        """The model's forward pass begins."""

    def before_forward(self, unit: Unit) -> None:
        """A block's forward pass begins."""

    def after_forward(self, unit: Unit) -> None:
        """A block's forward pass is over."""

    def after_model(self) -> None:
        """The model's forward pass is over, the loss is not computed yet."""

    def before_backward_of_model(self) -> None:
        """The loss has its gradient, the model's backward pass begins."""

    def before_backward(self, unit: Unit) -> None:
        """A block's backward pass begins."""

    def after_backward(self, unit: Unit) -> None:
        """A block's backward pass is over."""

    def before_backward_of_embedding(self) -> None:
        """All blocks are done; modules follow whose inputs have no gradient."""

    @property
    def carried(self) -> Hashable:
        """What decides about the next block, beyond what is held and `there`: alike after equal blocks."""
        return None

    def pass_over(self, unit: Unit, *, backward: bool) -> None:
        """A block that changes the ledger as the one before it, and of which nothing else is said."""

    def at_module(self, tensors: tuple[Tensor, ...], *, backward: bool) -> None:
        """A module with these parameters of its own computes."""

    def gradient_ready(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete, and no activation any more."""
        if self.micro_step == 0:
            self.ledger.add(GRADIENTS, parameter.numel * self.gradient_bytes)

    def after_backward_of_model(self) -> None:
        """The backward pass is over."""

    def step(self) -> None:
        """The optimizer's update, with the gradients that are there."""
        self.ledger.briefly(harness_norm(self.workload, self.largest_gradient()))
        self.ledger.briefly(self.update_temporary())

    def update_flat(self, piece: int, flattened: int, *of: Term) -> None:
        """DeepSpeed's update of `piece` elements, of whose gradients so many are laid out flat on the device.

        of: flat gradients, the same in the dtype of the masters, the update's own.
        """
        flat, widened, update = of
        workload, master = self.workload, self.workload.master_bytes
        accumulated = gradient_accumulation_bytes(workload)
        self.ledger.add(flat, flattened * accumulated)
        if master != accumulated:
            self.ledger.add(widened, flattened * master)
            self.ledger.look()
            self.ledger.drop(flat)
        times = update_copies(workload)
        on_device = workload.offload == "none" or workload.device == "cpu"
        self.ledger.briefly((update, times * piece * master if on_device else 0))
        self.ledger.drop(flat)
        self.ledger.drop(widened)

    def scatter(
        self, padded: int, pieces: int, width: int, reduced: Term, low: Term, *, sends: bool = True
    ) -> None:
        """FSDP's reduce-scatter of `padded` elements in a dtype of `width` bytes, of which each rank gets a
        piece."""
        own, master = padded // pieces, self.workload.master_bytes
        self.ledger.add(low if width != master else reduced, own * width)
        self.ledger.briefly(reduce_scattering(self.workload, padded * width if sends else 0))
        if width != master:
            self.ledger.add(reduced, own * master)
            self.ledger.look()
            self.ledger.drop(low)
        if not self.shard_stays:
            self.ledger.look()
            self.ledger.drop(reduced, own * master)

    def largest_gradient(self) -> int:
        """Elements of the largest tensor of gradients that this rank holds."""
        calls = updated_tensors(self.workload)
        return max((count for call in calls for count in call), default=0)

    def update_temporary(self) -> tuple[Term, int]:
        """What AdamW allocates while it updates on the device."""
        found = step_temporary(self.workload)
        holding = Term(
            kind="temporary", name=f"AdamW's update ({found.implementation})", formula=found.formula,
            source=found.source,
        )  # fmt: skip
        on_device = not found.host or self.workload.device == "cpu"
        return holding, found.bytes if on_device else 0

    @property
    def shard_stays(self) -> bool:
        """Whether a reduced shard stays on the device, and is not added to one that is there."""
        return self.micro_step == 0 or not self.workload.reduces_each

    @property
    def gradient_bytes(self) -> int:
        """Per element, as autograd gives it."""
        return self.workload.master_bytes


def gathering(workload: Workload, size: int) -> tuple[Term, int]:
    """While `size` bytes are gathered."""
    return GLOO_GATHER, size if workload.transport == "gloo" else 0


def reduce_scattering(workload: Workload, size: int) -> tuple[Term, int]:
    """While `size` bytes are reduced and scattered."""
    return GLOO_REDUCE_SCATTER, size if workload.transport == "gloo" else 0
