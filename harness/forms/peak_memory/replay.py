"""Drives a family through one ordinary step along an activation profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

from harness.forms.model.activations import ActivationProfile, Passage, Segment, Size
from harness.forms.model.layout import Layout, Tensor
from harness.forms.peak_memory.step_timeline import StepTimeline, Unit


class Replay:
    """One step of a timeline."""

    def __init__(
        self, timeline: StepTimeline, profile: ActivationProfile, *, micro_batch: int, sequence: int
    ) -> None:
        self._timeline = timeline
        self._shape = (micro_batch, sequence)
        self._profile = profile
        self._ledger = timeline.ledger
        self._hooked = hooks_modules(timeline)
        self._owned: dict[tuple[str, str], tuple[Tensor, ...]] = {}
        layout = timeline.workload.layout
        self._parameters = layout.once("by name", lambda: {t.name: t for t in layout.parameters})
        self._modules = layout.once("by module", lambda: _by_module(layout))

    def run(self) -> None:
        """All micro-steps and the update."""
        steps = self._timeline.workload.accumulation_steps
        self._timeline.begin()
        unlike = {0, steps // 2, steps - 1} if self._timeline.last_differs else {0, steps // 2}
        for micro_step in sorted(unlike if steps > 1 else {0}):
            self._timeline.micro_step = micro_step
            self._forward()
            self._backward()
        left = self._bytes(self._profile.kept) + self._bytes(self._profile.lingering)
        self._ledger.compute(left)
        with self._ledger.during("step"):
            self._timeline.step()

    def _bytes(self, size: Size) -> int:
        return size.bytes(*self._shape)

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
        count = len(timeline.units)
        growths = (profile.block_at(index).in_bytes(*self._shape).forward_growth for index in range(count))
        before = list(accumulate(growths, initial=held))

        def block(index: int) -> None:
            unit = timeline.units[index]
            self._ledger.compute(before[index])
            timeline.before_forward(unit)
            self._pass_forward(unit, profile.block_at(index), before[index])
            timeline.after_forward(unit)

        self._pass_blocks(range(count), block, backward=False)
        held = self._pass_forward(None, profile.head, before[count])
        self._ledger.compute(held)
        timeline.after_model()
        self._pass_forward(None, profile.loss, held)

    def _pass_forward(self, unit: Unit | None, segment: Segment, held: int) -> int:
        sized = segment.in_bytes(*self._shape)
        self._go_through(unit, sized.forward, held, backward=False)
        return held + sized.forward_growth

    def _backward(self) -> None:
        timeline, profile = self._timeline, self._profile
        self._ledger.phase = "backward"
        blocks = len(timeline.units)
        embedding = self._bytes(profile.kept)
        first = embedding + profile.embedding.in_bytes(*self._shape).held
        held = (profile.block_at(index).in_bytes(*self._shape).held for index in range(blocks))
        below = list(accumulate(held, initial=first))
        head = below[blocks]
        loss = head + profile.head.in_bytes(*self._shape).held
        self._pass_backward(None, profile.loss, loss)
        self._ledger.compute(loss)
        timeline.before_backward_of_model()
        self._pass_backward(None, profile.head, head)

        def block(index: int) -> None:
            unit = timeline.units[index]
            self._ledger.compute(below[index + 1])
            timeline.before_backward(unit)
            self._pass_backward(unit, profile.block_at(index), below[index])
            self._ledger.compute(below[index])
            timeline.after_backward(unit)

        self._pass_blocks(range(blocks)[::-1], block, backward=True)
        timeline.before_backward_of_embedding()
        self._pass_backward(None, profile.embedding, embedding)
        self._ledger.compute(embedding)
        timeline.after_backward_of_model()

    def _pass_blocks(self, order: range, block: Callable[[int], None], *, backward: bool) -> None:
        """Pass through blocks in this order, but for those that do what the two before them did.

        Each of equal blocks in a row changes the ledger by the same bytes once two of them did, so that each
        of their moments lies between the same one of the first and of the last: all others are passed over.
        """
        timeline, ledger = self._timeline, self._ledger
        alike = timeline.backward_alike if backward else timeline.forward_alike
        ends = self._ends_of_equal(order) if alike else {}
        known, index = None, order.start
        while index in order:
            over = abs(ends.get(index, index) - index) - timeline.looks_ahead - 1
            held, there = dict(ledger.held), set(timeline.there)
            block(index)
            if over > 0:
                change = ledger.since(held), self._moved(there, index), timeline.carried
                if change == known:
                    for _ in range(over):
                        index += order.step
                        self._pass_over(index, *change[1], backward=backward)
                    ledger.repeat(change[0], over)
                known = change
            else:
                known = None
            index += order.step

    def _moved(self, there: set[str], index: int) -> tuple[frozenset[int], frozenset[int]]:
        """Blocks whose weights came and went as this one passed, by their distance from it."""
        units, now = self._timeline.units, self._timeline.there
        if now == there:
            return frozenset(), frozenset()
        places = {unit.name: place - index for place, unit in enumerate(units)}
        came, went = (frozenset(places[name] for name in names) for names in (now - there, there - now))
        return came, went

    def _pass_over(self, index: int, came: frozenset[int], went: frozenset[int], *, backward: bool) -> None:
        """As though this block had passed; but for the ledger."""
        timeline = self._timeline
        timeline.pass_over(timeline.units[index], backward=backward)
        timeline.there |= {timeline.units[index + place].name for place in came}
        timeline.there -= {timeline.units[index + place].name for place in went}

    def _ends_of_equal(self, order: range) -> dict[int, int]:
        """Of each block the last of those that follow in this order and equal it."""
        shapes = self._timeline.shapes
        ends: dict[int, int] = {}
        for index in reversed(order):
            following = index + order.step
            equal = following in order and (
                shapes[index] == shapes[following]
                and self._profile.block_at(index) is self._profile.block_at(following)
            )
            ends[index] = ends[following] if equal else index
        return ends

    def _pass_backward(self, unit: Unit | None, segment: Segment, below: int) -> None:
        for gradient, points in segment.in_bytes(*self._shape).backward:
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


def _by_module(layout: Layout) -> Mapping[str, tuple[Tensor, ...]]:
    """The parameters of each module itself, tied ones too."""
    named = {tensor.name: tensor for tensor in layout.parameters}
    named |= {name: named[first] for name, first in layout.tied.items()}
    found: dict[str, tuple[Tensor, ...]] = {}
    for name, tensor in named.items():
        owner = name.rpartition(".")[0]
        found[owner] = (*found.get(owner, ()), tensor)
    return found


def hooks_modules(timeline: StepTimeline) -> bool:
    """Whether something happens as a module with parameters of its own computes; else points of a segment
    between two gradients differ in their size only, and the fullest of them is enough."""
    return type(timeline).at_module is not StepTimeline.at_module
