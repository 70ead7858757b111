"""Drives a family through one ordinary step along an activation profile."""

from __future__ import annotations

from collections.abc import Mapping

from harness.forms.activations import ActivationProfile, Point, Segment, Size
from harness.forms.layout import Tensor
from harness.forms.peaks.step_timeline import StepTimeline, Unit
from harness.forms.terms import Term

TRACED = "traced: transformers' model on fake tensors (harness/rank/probes/activation_trace.py)"


def _holding(name: str, formula: str) -> Term:
    return Term(kind="activations", name=name, formula=formula, source=TRACED)


class Replay:
    """One step of a timeline."""

    def __init__(
        self, timeline: StepTimeline, profile: ActivationProfile, *, micro_batch: int, sequence: int
    ) -> None:
        self._timeline = timeline
        self._shape = (micro_batch, sequence)
        self._profile = profile
        self._ledger = timeline.ledger
        self._sizes: dict[int, int] = {}
        self._owned: dict[tuple[str, str], tuple[Tensor, ...]] = {}
        self._parameters = {tensor.name: tensor for tensor in timeline.workload.layout.parameters}
        self._here = _holding("inside the segment that computes", "its fullest moment")
        self._below = _holding("of the other segments", "what they hold at that moment")

    def run(self) -> None:
        """All micro-steps and the update."""
        steps = self._timeline.workload.accumulation_steps
        self._timeline.begin()
        for micro_step in sorted({0, steps // 2, steps - 1} if steps > 1 else {0}):
            self._timeline.micro_step = micro_step
            self._forward()
            self._backward()
        left = self._bytes(self._profile.kept) + self._bytes(self._profile.lingering)
        self._ledger.activations = {self._below: left}
        with self._ledger.during("step"):
            self._timeline.step()

    def _bytes(self, size: Size) -> int:
        # Every block has the same sizes; the profile keeps them alive, so that their ids stay theirs.
        found = self._sizes.get(id(size))
        if found is None:
            found = self._sizes[id(size)] = size.bytes(*self._shape)
        return found

    def _look(self, below: int, here: Size) -> None:
        self._ledger.activations = {self._below: below, self._here: self._bytes(here)}
        self._ledger.look()

    def _come_to(self, unit: Unit | None, point: Point, below: int, *, backward: bool) -> None:
        here = self._bytes(point.live)
        # As its module begins there is no more than at this point, and no more than at the one before.
        before = min(below + here, sum(self._ledger.activations.values()))
        self._ledger.activations = {self._below: before}
        self._timeline.at_module(self._own(unit, point.module), backward=backward)
        self._look(below, point.live)

    def _at(self, below: int) -> None:
        self._ledger.activations = {self._below: below}

    def _forward(self) -> None:
        timeline, profile = self._timeline, self._profile
        self._ledger.phase = "forward"
        held = self._bytes(profile.lingering) + (self._bytes(profile.kept) if timeline.micro_step else 0)
        self._at(held)
        timeline.before_model()
        held = self._pass_forward(None, profile.embedding, held)
        for index, unit in enumerate(timeline.units):
            self._at(held)
            timeline.before_forward(unit)
            held = self._pass_forward(unit, profile.block_at(index), held)
            timeline.after_forward(unit)
        held = self._pass_forward(None, profile.head, held)
        self._at(held)
        timeline.after_model()
        self._pass_forward(None, profile.loss, held)

    def _pass_forward(self, unit: Unit | None, segment: Segment, held: int) -> int:
        for point in segment.forward:
            self._come_to(unit, point, held, backward=False)
        return held + self._bytes(segment.forward_growth)

    def _backward(self) -> None:
        timeline, profile = self._timeline, self._profile
        self._ledger.phase = "backward"
        blocks = len(timeline.units)
        embedding = self._bytes(profile.kept)
        first = embedding + self._bytes(profile.embedding.held)
        head = first + sum(self._bytes(profile.block_at(index).held) for index in range(blocks))
        loss = head + self._bytes(profile.head.held)
        self._pass_backward(None, profile.loss, loss)
        self._at(loss)
        timeline.before_backward_of_model()
        self._pass_backward(None, profile.head, head)
        below = head
        for index, unit in reversed(list(enumerate(timeline.units))):
            block = profile.block_at(index)
            self._at(below)
            below -= self._bytes(block.held)
            timeline.before_backward(unit)
            self._pass_backward(unit, block, below)
            self._at(below)
            timeline.after_backward(unit)
        timeline.before_backward_of_embedding()
        self._pass_backward(None, profile.embedding, embedding)
        self._at(embedding)
        timeline.after_backward_of_model()

    def _pass_backward(self, unit: Unit | None, segment: Segment, below: int) -> None:
        points = iter(segment.backward)
        point = next(points, None)
        for index in range(len(segment.gradients) + 1):
            if index:
                gradient = segment.gradients[index - 1]
                self._ledger.activations = {self._below: below, self._here: self._bytes(gradient.live)}
                self._timeline.gradient_ready(self._parameter(unit, gradient.parameter))
            while point is not None and point.ready == index:
                self._come_to(unit, point, below, backward=True)
                point = next(points, None)

    def _parameter(self, unit: Unit | None, name: str) -> Tensor:
        return self._parameters[f"{unit.name}.{name}" if unit else name]

    def _own(self, unit: Unit | None, module: str) -> tuple[Tensor, ...]:
        """Parameters of a module itself."""
        key = (unit.name if unit else "", module)
        if key not in self._owned:
            self._owned[key] = self._modules.get(".".join(filter(None, key)), ())
        return self._owned[key]

    @property
    def _modules(self) -> Mapping[str, tuple[Tensor, ...]]:
        if not hasattr(self, "_by_module"):
            by_module: dict[str, tuple[Tensor, ...]] = {}
            for name, tensor in self._parameters.items():
                owner = name.rpartition(".")[0]
                by_module[owner] = (*by_module.get(owner, ()), tensor)
            for name, first in self._timeline.workload.layout.tied.items():
                owner = name.rpartition(".")[0]
                by_module[owner] = (*by_module.get(owner, ()), self._parameters[first])
            self._by_module = by_module
        return self._by_module
