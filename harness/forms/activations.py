"""What a training step of a bare model keeps for its backward pass, and needs meanwhile, in micro-batch and
sequence: a profile that tracing found and that needs no torch to be read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from operator import add
from typing import Any

from harness.forms.layout import Derivations, Layout, derived

MONOMIALS = ("1", "b", "s", "b s", "s²", "b s²")
"""b: samples of a micro-batch, s: tokens of a sample."""
SEGMENTS = ("embedding", "block", "head", "loss")


@dataclass(frozen=True, order=True)
class Size:
    """Bytes as a polynomial: one coefficient per entry of MONOMIALS."""

    coefficients: tuple[int, ...] = (0,) * len(MONOMIALS)

    def __add__(self, other: Size) -> Size:
        return Size(tuple(map(sum, zip(self.coefficients, other.coefficients, strict=True))))

    def __sub__(self, other: Size) -> Size:
        return self + other.times(-1)

    def times(self, factor: int) -> Size:
        return Size(tuple(factor * value for value in self.coefficients))

    def at_most(self, other: Size) -> bool:
        """Whether this is at most the other whatever b and s."""
        return all(mine <= its for mine, its in zip(self.coefficients, other.coefficients, strict=True))

    def bytes(self, micro_batch: int, sequence: int) -> int:
        b, s = micro_batch, sequence
        values = (1, b, s, b * s, s * s, b * s * s)
        return sum(c * value for c, value in zip(self.coefficients, values, strict=True))

    def __str__(self) -> str:
        named = zip(self.coefficients, MONOMIALS, strict=True)
        parts = [str(c) if name == "1" else f"{c} {name}" for c, name in named if c]
        return " + ".join(parts).replace("+ -", "- ") or "0"


ChangeSize = Callable[[Size], Size]
Passage = tuple[str, int]
"""Through a module, or to a parameter's gradient, with the bytes of the segment at that moment."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Storages of one module that are held from the forward to the backward pass."""

    module: str
    size: Size


@dataclass(frozen=True, kw_only=True)
class Point:
    """A moment inside a segment that can be its fullest."""

    module: str
    """Whose operator runs; relative to the block."""
    live: Size
    """Beyond what lay there as the segment's forward pass began, or is left as its backward pass ends."""
    ready: int
    """Gradients of the segment that are handed over by then."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """A parameter's gradient as it is complete."""

    parameter: str
    """Relative to the block."""
    live: Size
    """Beyond what is left as the segment's backward pass ends, this gradient not counted."""


@dataclass(frozen=True, kw_only=True)
class SegmentBytes:
    """A segment of one micro-batch and sequence."""

    forward: list[Passage]
    backward: list[tuple[Passage | None, list[Passage]]]
    """Gradients, each with the points up to the next one."""
    forward_growth: int
    held: int


@dataclass(frozen=True, kw_only=True)
class Segment(Derivations):
    """Embedding, block, head, or loss."""

    saved: tuple[Saved, ...]
    forward: tuple[Point, ...]
    backward: tuple[Point, ...]
    gradients: tuple[Gradient, ...]
    """In the order in which they are complete."""
    forward_growth: Size
    """Held as its forward pass ends, beyond what was held as it began."""
    held: Size
    """Held as the backward pass of the next segment ends, beyond what is as this one's does."""

    @derived
    def in_bytes(self, micro_batch: int, sequence: int) -> SegmentBytes:
        """At one shape."""

        def of(size: Size) -> int:
            return size.bytes(micro_batch, sequence)

        backward: list[tuple[Passage | None, list[Passage]]] = [(None, [])]
        backward += [((each.parameter, of(each.live)), []) for each in self.gradients]
        for point in self.backward:
            backward[point.ready][1].append((point.module, of(point.live)))
        return SegmentBytes(
            forward=[(point.module, of(point.live)) for point in self.forward],
            backward=backward, forward_growth=of(self.forward_growth), held=of(self.held),
        )  # fmt: skip

    def sized(
        self, saved: ChangeSize, forward: ChangeSize, backward: ChangeSize, beside: ChangeSize | None = None
    ) -> Segment:
        """Copy with other sizes of what is saved and of what each moment holds.

        beside: also of gradients (with `backward`), growth and what is held; None: these stay.
        """
        found = replace(
            self,
            saved=tuple(replace(one, size=saved(one.size)) for one in self.saved),
            forward=tuple(replace(point, live=forward(point.live)) for point in self.forward),
            backward=tuple(replace(point, live=backward(point.live)) for point in self.backward),
        )
        if beside is None:
            return found
        gradients = tuple(replace(ready, live=backward(ready.live)) for ready in self.gradients)
        growth, held = beside(self.forward_growth), beside(self.held)
        return replace(found, gradients=gradients, forward_growth=growth, held=held)


@dataclass(frozen=True, kw_only=True)
class ActivationProfile:
    """One training step of one model at one precision, with one attention kernel."""

    embedding: Segment
    block: Segment
    head: Segment
    """What follows the blocks, up to the logits."""
    loss: Segment
    kept: Size
    """Left when the backward pass is over, as the loss is."""
    lingering: Size = Size()
    """Of the step before, until this one's loss is computed."""
    retained: Size = Size()
    """Of each block whose backward pass is over, until that of the model is."""
    recomputed: Segment | None = None
    """A block that recomputes, where every `between`-th does from the first on; None: all are alike."""
    between: int = 1
    blocks: tuple[Segment, ...] = ()
    """Every block's own, where they are not alike; empty: `block` and `recomputed` say all."""

    def block_at(self, index: int) -> Segment:
        """The block of this place, from 0."""
        if self.blocks:
            return self.blocks[index]
        return self.block if self.recomputed is None or index % self.between else self.recomputed

    def with_loss_in_chunks(self, tokens: int, vocabulary: int) -> ActivationProfile:
        """Profile with the logits of `tokens` tokens at a time, computed again in the backward pass.

        What each token holds per entry of the vocabulary is there for one chunk only, and nothing of it stays
        between the passes.
        """

        def chunk(size: Size, *, stays: bool = False) -> Size:
            # Of a model that was traced with one sample, all that tokens hold stands with the sequence.
            constant, b, s, each, *rest = size.coefficients
            of_s, of_each = (round(count / vocabulary) * vocabulary for count in (s, each))
            once = 0 if stays else (of_s + of_each) * tokens
            return Size((constant + once, b, s - of_s, each - of_each, *rest))

        def stays(size: Size) -> Size:
            return chunk(size, stays=True)

        head, loss = (of.sized(stays, chunk, chunk, stays) for of in (self.head, self.loss))
        return replace(self, head=head, loss=loss)

    def with_block(self, more: tuple[Saved, ...], *, until_backward: bool = True) -> ActivationProfile:
        """Profile whose blocks keep `more`.

        until_backward: whether a block keeps anything from its forward pass; otherwise what is kept more lies
        there while the block is recomputed.
        """
        added = sum((saved.size for saved in more), Size())
        between = added if until_backward else Size()
        block = replace(
            self.block,
            saved=self.block.saved + (more if until_backward else ()),
            backward=tuple(replace(point, live=point.live + added) for point in self.block.backward),
            forward_growth=self.block.forward_growth + between,
            held=self.block.held + between,
        )
        return replace(self, block=block)

    def beside_blocks(self, beside: Size) -> ActivationProfile:
        """Profile with `beside` more at every moment within a block, and gone after it."""
        more = partial(add, beside)
        wider = partial(Segment.sized, saved=_same, forward=more, backward=more)
        again, blocks = self.recomputed and wider(self.recomputed), tuple(map(wider, self.blocks))
        return replace(self, block=wider(self.block), recomputed=again, blocks=blocks)

    def forward_bytes(self, layers: int, micro_batch: int, sequence: int) -> int:
        """The most that is there from the end of the blocks' forward pass to the loss."""
        blocks = (self.block_at(index) for index in range(layers))
        grown = (s.in_bytes(micro_batch, sequence).forward_growth for s in (self.embedding, *blocks))
        below = self.lingering.bytes(micro_batch, sequence) + sum(grown)
        most = below
        for segment in (self.head, self.loss):
            sized = segment.in_bytes(micro_batch, sequence)
            most = max([most, *(below + there for _, there in sized.forward)])
            below += sized.forward_growth
        return most

    def with_frozen(self, layout: Layout, *, least: bool, recomputes: bool) -> ActivationProfile:
        """Profile of a model of which `layout` freezes parameters, at least or at most.

        Nothing before the first trained parameter is kept, since no gradient goes there. Behind it frozen
        layers keep what trained ones do at most, and at least nothing. recomputes: blocks do, so that this
        decides about what lies there while they compute again.
        """
        units, found = dict(layout.units()), {}
        root = units.pop("", [])
        names = [tensor.name for tensor in layout.parameters]
        begin = min((names.index(tensors[0].name) for tensors in units.values() if tensors), default=0)
        reached = any(t.name not in layout.frozen and names.index(t.name) < begin for t in root)
        frozen_root = frozenset(tensor.name for tensor in root) & layout.frozen
        embedding = _frozen(self.embedding, frozen_root, least=least, all_of_it=not reached)
        blocks: list[Segment] = []
        for index, (name, tensors) in enumerate(units.items()):
            frozen = frozenset(t.name.removeprefix(f"{name}.") for t in tensors if t.name in layout.frozen)
            trains, block = len(frozen) < len(tensors), self.block_at(index)
            key = id(block), frozen, reached
            if key not in found:
                found[key] = (
                    _frozen(block, frozen, least=least, all_of_it=not reached, recomputes=recomputes)
                    if reached or trains
                    else _untouched(block, least=least)
                )
            blocks.append(found[key])
            reached = reached or trains
        head = _frozen(self.head, frozen_root, least=least, all_of_it=not reached)
        return replace(self, embedding=embedding, head=head, blocks=tuple(blocks))

    def saved_bytes(self, layers: int, micro_batch: int, sequence: int) -> int:
        """All that is held between forward and backward pass."""
        sizes = [*self.embedding.saved, *(self.block.saved * layers), *self.head.saved, *self.loss.saved]
        return sum(saved.size.bytes(micro_batch, sequence) for saved in sizes)


def _untouched(segment: Segment, *, least: bool) -> Segment:
    """A segment that no gradient reaches: it computes, and keeps nothing."""
    forward = tuple(replace(point, live=Size()) for point in segment.forward) if least else segment.forward
    return Segment(saved=(), forward=forward, backward=(), gradients=(), forward_growth=Size(), held=Size())


def _frozen(
    segment: Segment, frozen: Collection[str], *, least: bool, all_of_it: bool, recomputes: bool = False
) -> Segment:
    """A segment without gradients of frozen parameters, which are named as in the segment.

    least: without what layers keep all of whose parameters are frozen; all_of_it: of a segment whose input
    needs no gradient, without all of it.
    """
    if not frozen and not (least and all_of_it):
        return segment
    trained = [gradient.parameter not in frozen for gradient in segment.gradients]
    ready = list(accumulate(trained, initial=0))
    found = replace(
        segment,
        backward=tuple(replace(point, ready=ready[point.ready]) for point in segment.backward),
        gradients=tuple(g for g, is_trained in zip(segment.gradients, trained, strict=True) if is_trained),
    )
    if not least:
        return found
    modules = {name.rpartition(".")[0] for name in frozen}
    modules -= {gradient.parameter.rpartition(".")[0] for gradient in found.gradients}
    gone = [s for s in segment.saved if all_of_it or s.module in modules]
    kept = tuple(saved for saved in segment.saved if saved not in gone)
    size = sum((saved.size for saved in gone), Size())
    if all_of_it or recomputes:
        return replace(found.sized(*[_nothing] * 4), saved=kept, held=sum((s.size for s in kept), Size()))
    return replace(found.sized(_same, *[lambda live: live - size] * 3), saved=kept)


def _same(size: Size) -> Size:
    return size


def _nothing(size: Size) -> Size:
    return Size()


def no_activations(layout: Layout) -> ActivationProfile:
    """The profile of a step that keeps nothing: its modules run and its gradients come, in the model's order.

    What a timeline holds along it is the strategy's own: states, gathered weights and buffers.
    """
    units = dict(layout.units())
    root = [tensor.name for tensor in units.pop("", [])]
    in_order = [tensor.name for tensor in layout.parameters]
    first_block = min((in_order.index(unit[0].name) for unit in units.values()), default=len(in_order))
    before = [name for name in root if in_order.index(name) < first_block]
    after = [name for name in root if name not in before]

    def empty(names: Sequence[str], unit: str = "", tied: Iterable[str] = ()) -> Segment:
        own = {name.removeprefix(f"{unit}.") if unit else name: name for name in names}
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in (*own, *tied)))
        points: list[Point] = []
        gradients: list[Gradient] = []
        for module in reversed(modules):
            points.append(Point(module=module, live=Size(), ready=len(gradients)))
            gradients += [
                Gradient(parameter=short, live=Size())
                for short, name in reversed(own.items())
                if short.rpartition(".")[0] == module and name not in layout.frozen
            ]
        return Segment(
            saved=(), forward=tuple(replace(point, ready=0) for point in reversed(points)),
            backward=(*points, Point(module="", live=Size(), ready=len(gradients))),
            gradients=tuple(gradients), forward_growth=Size(), held=Size(),
        )  # fmt: skip

    nothing = empty(())
    return ActivationProfile(
        embedding=empty(before), head=empty(after, tied=layout.tied), loss=nothing, kept=Size(),
        block=nothing,
        blocks=tuple(empty([tensor.name for tensor in unit], name) for name, unit in units.items()),
    )  # fmt: skip


def to_json(profile: ActivationProfile) -> dict[str, Any]:
    """The profile as lists and numbers."""

    def rows(points: Iterable[Point]) -> list[list[Any]]:
        return [[point.module, point.ready, *point.live.coefficients] for point in points]

    segments = {
        name: {
            "saved": [[saved.module, *saved.size.coefficients] for saved in segment.saved],
            "forward": rows(segment.forward),
            "backward": rows(segment.backward),
            "gradients": [[g.parameter, *g.live.coefficients] for g in segment.gradients],
            "forward_growth": list(segment.forward_growth.coefficients),
            "held": list(segment.held.coefficients),
        }
        for name in SEGMENTS
        for segment in (getattr(profile, name),)
    }
    return segments | {"kept": list(profile.kept.coefficients)}


def from_json(document: Mapping[str, Any]) -> ActivationProfile:
    """The inverse of `to_json`."""

    def points(rows: Iterable[list[Any]]) -> tuple[Point, ...]:
        return tuple(Point(module=name, ready=ready, live=Size(tuple(size))) for name, ready, *size in rows)

    def segment(found: Mapping[str, Any]) -> Segment:
        return Segment(
            saved=tuple(Saved(module=name, size=Size(tuple(size))) for name, *size in found["saved"]),
            forward=points(found["forward"]),
            backward=points(found["backward"]),
            gradients=tuple(Gradient(parameter=n, live=Size(tuple(size))) for n, *size in found["gradients"]),
            forward_growth=Size(tuple(found["forward_growth"])),
            held=Size(tuple(found["held"])),
        )

    embedding, block, head, loss = (segment(document[name]) for name in SEGMENTS)
    kept = Size(tuple(document["kept"]))
    return ActivationProfile(embedding=embedding, block=block, head=head, loss=loss, kept=kept)


SELECTIVE = "selective"
EVERY = "every-"
PARTIAL_CHECKPOINTING = rf"^({SELECTIVE}|{EVERY}([2-9]|[1-9][0-9]{{1,3}}))$"
"""Values of `training.activation_checkpointing` that are neither true nor false."""

RECOMPUTED_UNTIL = {
    "BloomForCausalLM": "mlp.dense_4h_to_h",
    "GPT2LMHeadModel": "mlp.c_proj",
    "LlamaForCausalLM": "mlp.down_proj",
    "MistralForCausalLM": "mlp.down_proj",
    "Qwen2ForCausalLM": "mlp.down_proj",
}
"""Class of the model -> the last module of a block that saves a tensor for its backward pass, where
`torch.utils.checkpoint` stops early. After it these blocks only add the residual, which saves nothing."""


def recomputed_until(architecture: str | None) -> str | None:
    """Name of that module within its block; None for an architecture that is not modelled."""
    return RECOMPUTED_UNTIL.get(architecture or "")


def blocks_between(checkpointing: bool | str) -> int | None:
    """N where every N-th block recomputes all of its activations, from the first on; None: no block does."""
    if isinstance(checkpointing, str):
        return int(checkpointing.removeprefix(EVERY)) if checkpointing.startswith(EVERY) else None
    return 1 if checkpointing else None


def recomputed_share(checkpointing: bool | str, layers: int) -> Fraction:
    """Share of the blocks' matrix products and attention that the backward pass computes once more.

    Selective checkpointing keeps the outputs of both. `every-N` recomputes blocks 0, N, 2 N, ...
    (`_set_gradient_checkpointing`, transformers 5.23, modeling_utils.py).
    """
    between = blocks_between(checkpointing)
    return Fraction(-(-layers // between), layers) if between and layers else Fraction(0)
