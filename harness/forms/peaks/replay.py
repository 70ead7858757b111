"""Drives a family through one ordinary step along an activation profile."""

from __future__ import annotations

from collections.abc import Mapping

from harness.forms.activations import ActivationProfile, Segment, Size
from harness.forms.layout import Tensor
from harness.forms.peaks.step_timeline import StepTimeline, Unit

Passage = tuple[str, int]
"""Through a module, or to a parameter's gradient, with the bytes of the segment at that moment."""


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
        self._passes: dict[int, tuple[list[Passage], list[tuple[Passage | None, list[Passage]]]]] = {}
        """Forward and backward pass of a segment: gradients, each with the points up to the next one."""
        self._hooked = hooks_modules(timeline)
        self._owned: dict[tuple[str, str], tuple[Tensor, ...]] = {}
        self._parameters = {tensor.name: tensor for tensor in timeline.workload.layout.parameters}

    def run(self) -> None:
        """All micro-steps and the update."""
        steps = self._timeline.workload.accumulation_steps
        self._timeline.begin()
        for micro_step in sorted({0, steps // 2, steps - 1} if steps > 1 else {0}):
            self._timeline.micro_step = micro_step
            self._forward()
            self._backward()
        left = self._bytes(self._profile.kept) + self._bytes(self._profile.lingering)
        self._ledger.compute(left)
        with self._ledger.during("step"):
            self._timeline.step()

    def _bytes(self, size: Size) -> int:
        # Every block has the same sizes; the profile keeps them alive, so that their ids stay theirs.
        found = self._sizes.get(id(size))
        if found is None:
            found = self._sizes[id(size)] = size.bytes(*self._shape)
        return found

    def _passes_of(
        self, segment: Segment
    ) -> tuple[list[Passage], list[tuple[Passage | None, list[Passage]]]]:
        found = self._passes.get(id(segment))
        if found is None:
            forward = [(point.module, self._bytes(point.live)) for point in segment.forward]
            backward: list[tuple[Passage | None, list[Passage]]] = [(None, [])]
            backward += [((each.parameter, self._bytes(each.live)), []) for each in segment.gradients]
            for point in segment.backward:
                backward[point.ready][1].append((point.module, self._bytes(point.live)))
            found = self._passes[id(segment)] = forward, backward
        return found

    def _go_through(self, unit: Unit | None, points: list[Passage], below: int, *, backward: bool) -> None:
        ledger = self._ledger
        for module, here in points:
            if self._hooked:
                # As its module begins there is no more than at this point, nor than at the one before.
                ledger.compute(min(below + here, ledger.below + ledger.here))
                self._timeline.at_module(self._own(unit, module), backward=backward)
            ledger.below, ledger.here = below, here
            ledger.look()

    def _forward(self) -> None:
        timeline, profile = self._timeline, self._profile
        self._ledger.phase = "forward"
        held = self._bytes(profile.lingering) + (self._bytes(profile.kept) if timeline.micro_step else 0)
        self._ledger.compute(held)
        timeline.before_model()
        held = self._pass_forward(None, profile.embedding, held)
        for index, unit in enumerate(timeline.units):
            self._ledger.compute(held)
            timeline.before_forward(unit)
            held = self._pass_forward(unit, profile.block_at(index), held)
            timeline.after_forward(unit)
        held = self._pass_forward(None, profile.head, held)
        self._ledger.compute(held)
        timeline.after_model()
        self._pass_forward(None, profile.loss, held)

    def _pass_forward(self, unit: Unit | None, segment: Segment, held: int) -> int:
        self._go_through(unit, self._passes_of(segment)[0], held, backward=False)
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
        self._ledger.compute(loss)
        timeline.before_backward_of_model()
        self._pass_backward(None, profile.head, head)
        below = head
        for index, unit in reversed(list(enumerate(timeline.units))):
            block = profile.block_at(index)
            self._ledger.compute(below)
            below -= self._bytes(block.held)
            timeline.before_backward(unit)
            self._pass_backward(unit, block, below)
            self._ledger.compute(below)
            timeline.after_backward(unit)
        timeline.before_backward_of_embedding()
        self._pass_backward(None, profile.embedding, embedding)
        self._ledger.compute(embedding)
        timeline.after_backward_of_model()

    def _pass_backward(self, unit: Unit | None, segment: Segment, below: int) -> None:
        for gradient, points in self._passes_of(segment)[1]:
            if gradient:
                name, here = gradient
                self._ledger.compute(below, here)
                self._timeline.gradient_ready(self._parameter(unit, name))
            self._go_through(unit, points, below, backward=True)

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


def hooks_modules(timeline: StepTimeline) -> bool:
    """Whether something happens as a module with parameters of its own computes; else points of a segment
    between two gradients differ in their size only, and the fullest of them is enough."""
    return type(timeline).at_module is not StepTimeline.at_module
