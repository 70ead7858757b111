"""What a rank holds as a step proceeds: a ledger by cause, hooks for families, and what drives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal

from harness.forms.activations import ActivationProfile, Segment, Size
from harness.forms.families import model_states
from harness.forms.layout import Layout, Tensor, elements
from harness.forms.optimizers import step_temporary, update_copies, updated_tensors
from harness.forms.terms import Term, named_terms
from harness.forms.workload import Workload
from harness.forms.zero0 import gradient_accumulation_bytes

Phase = Literal["forward", "backward", "reduction", "step"]
Part = Literal["embedding", "block", "head", "loss"]


@dataclass(frozen=True, kw_only=True)
class PeakMoment:
    """A state of the ledger."""

    bytes: int
    held: dict[Term, int]


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
        self.all_held = 0
        """Bytes without activations."""
        self._peaks: dict[Phase, tuple[int, dict[Term, int]]] = {}

    def add(self, holding: Term, count: int) -> None:
        """Allocate bytes."""
        if count:
            self.held[holding] = self.held.get(holding, 0) + count
            self.change(holding, count)

    def drop(self, holding: Term, count: int | None = None) -> None:
        """Free bytes; None: all of this cause."""
        gone = self.held.pop(holding, 0) if count is None else count
        if count:
            self.held[holding] -= count
        if gone:
            self.change(holding, -gone)

    def change(self, holding: Term, count: int) -> None:
        """More bytes of a cause, or fewer."""
        self.all_held += count

    def compute(self, below: int, here: int = 0) -> None:
        """Bytes of activations from now on."""
        self.below, self.here = below, here

    def moments(self) -> dict[Phase, PeakMoment]:
        """The fullest state of each phase."""
        return {
            phase: PeakMoment(bytes=total, held={term: count for term, count in held.items() if count})
            for phase, (total, held) in self._peaks.items()
        }

    def look(self) -> None:
        """Compare the present state with the fullest of its phase."""
        total = self.all_held + self.below + self.here
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
STEP = named_terms("step_timeline")
GRADIENTS: Term = STEP.gradients


def deepspeed_norm(workload: Workload, largest: int) -> tuple[Term, int]:
    """`g.data.to(get_norm_dtype())` of one gradient after the other (DeepSpeed, get_grad_norm_direct)."""
    return STEP.norm_copy, DOUBLE_BYTES * largest if workload.has_fp64 else 0


STATE_SOURCE = "harness.forms, closed forms of the model states"


@dataclass(frozen=True)
class Unit:
    """A block, or '' for all other modules."""

    name: str
    parameters: tuple[Tensor, ...]
    place: int = 0
    """Among the blocks."""

    @property
    def elements(self) -> int:
        return elements(self.parameters)

    def trained(self, layout: Layout) -> tuple[Tensor, ...]:
        """Parameters that get gradients."""
        return tuple(tensor for tensor in self.parameters if not layout.is_frozen(tensor))


@dataclass
class StepTimeline:
    """One step under one strategy; this one is a single process, which shards and reduces nothing."""

    workload: Workload
    ledger: Ledger
    units: tuple[Unit, ...] = field(init=False)
    root: Unit = field(init=False)
    """Of a model without modules around its blocks it is empty."""
    micro_step: int = 0
    there: set[str] = field(default_factory=set)
    """Names of units whose weights are gathered: ahead (FSDP2), or and not freed yet (FSDP1)."""
    keeps_whole: ClassVar[bool] = False
    """Whether micro-steps before the last may leave gradients that the last one divides."""
    casts_weights: ClassVar[bool] = False
    """Whether gradients come in the compute dtype; under autocast in the masters'."""

    def __post_init__(self) -> None:
        named = self.workload.units()
        blocks = [(name, tuple(tensors)) for name, tensors in named if name]
        self.units = tuple(Unit(name, tensors, place) for place, (name, tensors) in enumerate(blocks))
        self.root = Unit("", tuple(tensor for name, tensors in named if not name for tensor in tensors))

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
        self.ledger.add(STEP.batch, batches * 16 * tokens)

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

    def modules(self, part: Part, tensors: Sequence[Sequence[Tensor]], *, backward: bool) -> None:
        """A part of the model computes next, of modules with these parameters of their own."""

    def gradient_ready(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete, and no activation any more."""
        if self.micro_step == 0:
            self.ledger.add(GRADIENTS, parameter.numel * self.gradient_bytes)

    def after_backward_of_model(self) -> None:
        """The backward pass is over."""

    def step(self) -> None:
        """The optimizer's update, with the gradients that are there: their norm, and what AdamW allocates."""
        workload, found = self.workload, step_temporary(self.workload)
        largest = max((count for call in updated_tensors(workload) for count in call), default=0)
        # `backends/optimizer/gradients.py`, global_norm: neither dot products of short pieces (fp32 on the
        # CPU) nor `_foreach_norm` (CUDA) copy a gradient; what they add up in is below a thousandth of it.
        copies = workload.device == "cpu" and workload.master_dtype != "float32"
        self.ledger.briefly((STEP.norm_copy, DOUBLE_BYTES * largest if copies else 0))
        update = Term(
            kind="temporary", name=f"AdamW's update ({found.implementation})", formula=found.formula,
            source=found.source,
        )  # fmt: skip
        on_device = not found.host or workload.device == "cpu"
        self.ledger.briefly((update, found.bytes if on_device else 0))

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

    @property
    def shard_stays(self) -> bool:
        """Whether a reduced shard stays on the device, and is not added to one that is there."""
        return self.micro_step == 0 or not self.workload.reduces_each

    @property
    def gradient_bytes(self) -> int:
        """Per element, as autograd gives it."""
        return self.workload.compute_bytes if self.casts_weights else self.workload.master_bytes


def gathering(workload: Workload, size: int) -> tuple[Term, int]:
    """While `size` bytes are gathered."""
    return STEP.gloo_gather, size if workload.transport == "gloo" else 0


def reduce_scattering(workload: Workload, size: int) -> tuple[Term, int]:
    """While `size` bytes are reduced and scattered."""
    return STEP.gloo_reduce_scatter, size if workload.transport == "gloo" else 0


class Replay:
    """One step of a timeline along an activation profile, part by part: embedding, blocks, head, loss."""

    def __init__(
        self, timeline: StepTimeline, profile: ActivationProfile, *, micro_batch: int, sequence: int
    ) -> None:
        self._timeline, self._shape = timeline, (micro_batch, sequence)
        self._profile = profile
        self._ledger = timeline.ledger
        self._follows_modules = type(timeline).modules is not StepTimeline.modules
        layout = timeline.workload.layout
        self._parameters = layout.once("by name", lambda: {t.name: t for t in layout.parameters})
        self._own = layout.once("by module", lambda: _by_module(layout))

    def run(self) -> None:
        """The first micro-step, the last, one between where that differs from both, and the update."""
        timeline, ledger = self._timeline, self._ledger
        timeline.begin()
        steps = timeline.workload.accumulation_steps
        differs = timeline.keeps_whole and not timeline.workload.reduces_each
        for micro_step in sorted({0, *([steps // 2] if differs else []), steps - 1}):
            timeline.micro_step = micro_step
            self.forward()
            self.backward()
        ledger.compute(self._bytes(self._profile.kept) + self._bytes(self._profile.lingering))
        with ledger.during("step"):
            timeline.step()

    def forward(self) -> None:
        """The forward pass of a micro-step."""
        timeline, profile, ledger = self._timeline, self._profile, self._ledger
        ledger.phase = "forward"
        held = self._bytes(profile.lingering) + (self._bytes(profile.kept) if timeline.micro_step else 0)
        ledger.compute(held)
        timeline.before_model()
        for part, index in self._parts():
            unit = None if index is None else timeline.units[index]
            sized = self._segment(part, index).in_bytes(*self._shape)
            ledger.compute(held)
            if part == "loss":
                timeline.after_model()
            if unit:
                timeline.before_forward(unit)
            self._tell_modules(part, index, backward=False)
            for _, here in sized.forward:
                ledger.compute(held, here)
                ledger.look()
            held += sized.forward_growth
            if unit:
                timeline.after_forward(unit)

    def backward(self) -> None:
        """Its backward pass."""
        timeline, profile, ledger = self._timeline, self._profile, self._ledger
        ledger.phase = "backward"
        parts = list(self._parts())
        held = [self._segment(*part).in_bytes(*self._shape).held for part in parts[:-1]]
        below = list(accumulate(held, initial=self._bytes(profile.kept)))
        retained = self._bytes(profile.retained)
        for (part, index), beneath in zip(reversed(parts), reversed(below), strict=True):
            done = {"block": len(timeline.units) - 1 - (index or 0), "embedding": len(timeline.units)}
            beneath += retained * done.get(part, 0)
            unit = None if index is None else timeline.units[index]
            if part == "head":
                timeline.before_backward_of_model()
            if unit:
                timeline.before_backward(unit)
            self._tell_modules(part, index, backward=True)
            for gradient, points in self._segment(part, index).in_bytes(*self._shape).backward:
                if gradient:
                    ledger.compute(beneath, gradient[1])
                    name = f"{unit.name}.{gradient[0]}" if unit else gradient[0]
                    timeline.gradient_ready(self._parameters[name])
                for _, here in points:
                    ledger.compute(beneath, here)
                    ledger.look()
            ledger.compute(beneath)
            if unit:
                timeline.after_backward(unit)
        timeline.after_backward_of_model()

    def _parts(self) -> Iterator[tuple[Part, int | None]]:
        yield "embedding", None
        yield from (("block", index) for index in range(len(self._timeline.units)))
        yield "head", None
        yield "loss", None

    def _segment(self, part: Part, index: int | None) -> Segment:
        profile = self._profile
        if index is not None:
            return profile.block_at(index)
        return {"embedding": profile.embedding, "head": profile.head, "loss": profile.loss}[part]

    def _tell_modules(self, part: Part, index: int | None, *, backward: bool) -> None:
        if not self._follows_modules:
            return
        prefix = "" if index is None else f"{self._timeline.units[index].name}."
        points = self._segment(part, index).forward
        names = dict.fromkeys(f"{prefix}{point.module}".rstrip(".") for point in points)
        own = [self._own[name] for name in names if name in self._own]
        self._timeline.modules(part, own, backward=backward)

    def _bytes(self, size: Size) -> int:
        return size.bytes(*self._shape)


def _by_module(layout: Layout) -> Mapping[str, tuple[Tensor, ...]]:
    """The parameters of each module itself, tied ones too."""
    named = {tensor.name: tensor for tensor in layout.parameters}
    named |= {name: named[first] for name, first in layout.tied.items()}
    found: dict[str, tuple[Tensor, ...]] = {}
    for name, tensor in named.items():
        owner = name.rpartition(".")[0]
        found[owner] = (*found.get(owner, ()), tensor)
    return found
