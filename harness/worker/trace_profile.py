"""Turns the events of a traced step into a profile: segments, what they hold, and their fullest moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.forms.activations import MONOMIALS, ActivationProfile, Gradient, Point, Saved, Segment, Size
from harness.worker.storage_events import Event


def profile_of_events(
    events: Sequence[Event], *, batch: int, sequence: int, blocks: int
) -> ActivationProfile:
    """Raises ValueError for a storage whose size is no product of batch, sequence and widths."""
    replay = _Replay(batch, sequence, blocks)
    for event in events:
        replay.take(event)
    replay.close()
    middle = blocks // 2
    return ActivationProfile(
        embedding=replay.segment(0), block=replay.segment(1 + middle), head=replay.segment(blocks + 1),
        loss=replay.segment(blocks + 2), kept=replay.ends[0],
    )  # fmt: skip


def size_of(count: int, batch: int, sequence: int) -> Size:
    """The bytes of a storage as a polynomial, from how often batch and sequence divide them."""
    powers_of_b = 0
    if batch > 1 and count % batch == 0:
        count, powers_of_b = count // batch, 1
    coefficients = [0] * len(MONOMIALS)
    shifted = count % (sequence - 1) == 0
    if shifted:  # tokens that have a next one
        count //= sequence - 1
    powers_of_s = 0
    while count % sequence == 0:
        count, powers_of_s = count // sequence, powers_of_s + 1
    # batch 1: everything that has a sequence is of one sample
    for power, factor in (
        ((powers_of_s + 1, count), (powers_of_s, -count)) if shifted else ((powers_of_s, count),)
    ):
        coefficients[_monomial(powers_of_b, power)] += factor
    return Size(tuple(coefficients))


def _monomial(powers_of_b: int, powers_of_s: int) -> int:
    return {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3, (0, 2): 4, (1, 2): 5}[powers_of_b, powers_of_s]


@dataclass
class _Pass:
    """One pass over one segment."""

    base: Size
    points: list[list[tuple[str, Size]]] = field(default_factory=lambda: [[]])
    """By number of gradients handed over: the non-dominated (module, live) in absolute terms."""
    ready: list[tuple[str, Size]] = field(default_factory=list)


class _Replay:
    """Segment 0 is the embedding, then come the blocks, the head and the loss."""

    def __init__(self, batch: int, sequence: int, blocks: int) -> None:
        self._batch, self._sequence, self._last = batch, sequence, blocks + 2
        self._live = Size()
        self._storages: dict[int, tuple[int, str, Size]] = {}
        self._saved: dict[int, dict[str, Size]] = {}
        self._passes: dict[tuple[str, int], _Pass] = {}
        self._current: _Pass | None = None
        self._segment = 0
        self.ends: dict[int, Size] = {}
        """Live as the backward pass of each segment ends."""

    def take(self, event: Event) -> None:
        match event.kind:
            case "mark":
                self._mark(event.name)
            case "allocate":
                size = size_of(event.bytes, self._batch, self._sequence)
                self._storages[event.storage] = (self._segment, event.module, size)
                self._live += size
                self._point(event.module)
            case "scratch":
                scratch = size_of(event.bytes, self._batch, self._sequence)
                self._live += scratch
                self._point(event.module)
                self._live -= scratch
            case "free":
                self._drop(event.storage)
            case "ready":
                assert self._current is not None
                self._drop(event.storage)
                self._current.ready.append((event.name, self._live))
                self._current.points.append([])

    def close(self) -> None:
        self.ends[0] = self._live

    def segment(self, index: int) -> Segment:
        forward, backward = self._passes["forward", index], self._passes["backward", index]
        following = self._passes.get(("forward", index + 1))
        below = self.ends.get(index + 1, None)
        growth = following.base - forward.base if following else Size()
        return Segment(
            saved=tuple(Saved(module=m, size=s) for m, s in sorted(self._saved.get(index, {}).items())),
            forward=tuple(_points(forward, forward.base)),
            backward=tuple(_points(backward, self.ends[index])),
            gradients=tuple(
                Gradient(parameter=n, live=live - self.ends[index]) for n, live in backward.ready
            ),
            forward_growth=growth,
            held=below - self.ends[index] if below is not None else Size(),
        )

    def _mark(self, name: str) -> None:
        if name == "end":
            return
        kind, _, of = name.partition(" ")
        index = 0 if of == "embedding" else int(of) + 1
        if kind == "backward":
            if index == self._last:
                self._note_saved()
            self.ends[index + 1] = self._live
        self._segment = index
        self._current = self._passes[kind, index] = _Pass(base=self._live)

    def _note_saved(self) -> None:
        for segment, module, size in self._storages.values():
            saved = self._saved.setdefault(segment, {})
            saved[module] = saved.get(module, Size()) + size

    def _drop(self, storage: int) -> None:
        if storage in self._storages:
            self._live -= self._storages.pop(storage)[2]

    def _point(self, module: str) -> None:
        if self._current is not None:
            front = self._current.points[-1]
            if not any(m == module and self._live.at_most(live) for m, live in front):
                front[:] = [(m, live) for m, live in front if m != module or not live.at_most(self._live)]
                front.append((module, self._live))


def _points(one: _Pass, base: Size) -> Iterator[Point]:
    for ready, front in enumerate(one.points):
        for module, live in front:
            yield Point(module=module, live=live - base, ready=ready)
